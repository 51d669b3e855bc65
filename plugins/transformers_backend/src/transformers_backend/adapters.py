"""`Adapters`: adapters of PEFT that are loaded, replaced and unloaded by name, and the one that a call runs with.

PEFT itself switches, because each of its methods does it in its own way. It also changes `requires_grad`, and the owner
of a model relies on what is active, so a call puts both back. An adapter is never changed in place: a new one is added
under a name of its own, and the old one is removed when that has worked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corelm.errors import CapabilityError, InvalidRequestError, described, first_few
from corelm.spec import Adapter, WeightUpdate, whole_tensor
from corelm_engine_kit import unknown_adapter
from corelm_engine_kit.adapter_folder import CHANGES_BASE, no_adapter
from transformers_backend.engine import CausalLM, is_device_failure, runs_layers_again

#: How the names begin that PEFT knows these adapters by.
PREFIX = "corelm_adapter_"
#: Other options of a LoRA that change the base weights.
_OPTIONS_THAT_CHANGE_BASE = ("kasa_config", "layer_replication", "target_parameters")
#: Kinds of adapters that PEFT's switch for layers does not reach.
_NOT_SWITCHED = {
    "ADAPTION_PROMPT": "an adaption prompt replaces modules of the model when it is switched",
    "XLORA": "X-LoRA mixes several adapters that have no names of their own",
}


class Adapters:
    """The adapters of one model.

    Args:
        engine: drives the model. The first adapter wraps a model that was loaded here, so ``engine.module`` changes.
    """

    def __init__(self, engine: CausalLM) -> None:
        self._engine = engine
        # By the name that the caller gave: the name that PEFT has.
        self._loaded: dict[str, str] = {}
        self._count = 0
        self._wrapped_here = False

    @contextmanager
    def switched(self, adapter: Adapter, *, grad: bool = False) -> Iterator[None]:
        """Run the model with the adapter of a request inside."""
        module: Any = self._engine.module
        if adapter is None:
            _refuse_rewriting(module)
            yield
            return
        name = None if adapter is False else self._name_in_peft(adapter)
        if module is self._engine.base:
            yield
            return
        for each, config in module.peft_config.items():
            _refuse_unswitchable(config, self._engine.base, active=each == name)
        if grad and runs_layers_again(module):
            raise CapabilityError(
                "adapter= and gradient checkpointing exclude each other: layers run again in the backward pass, when "
                "the adapter is switched back. Call model.set_adapter yourself and leave adapter= out",
                capability="adapters",
            )
        with self._kept() as trained:
            if name is None:
                module.base_model.disable_adapter_layers()
            else:
                module.set_adapter(name)
                module.base_model.enable_adapter_layers()
                for layer in _layers(module):
                    # Some kinds run an adapter in every layer that has any.
                    if not any(name in getattr(layer, part, (name,)) for part in layer.adapter_layer_names):
                        layer.enable_adapters(False)
            _set_trained(module, trained)
            yield

    def update(self, request: WeightUpdate) -> None:
        """Load, replace or unload an adapter.

        Raises:
            InvalidRequestError: it does not fit the model, is not there, or belongs to the owner of the model. Nothing
                has changed.
            CapabilityError: PEFT cannot add it to this model. Nothing has changed.
        """
        name = request.adapter
        assert name is not None
        old = self._loaded.get(name)
        if old is None and name in self._names_of_owner():
            raise InvalidRequestError(
                f"adapter: {name!r} belongs to the model object that was opened; train it there, or load this one "
                "under another name",
                field="adapter",
            )
        if request.unloads:
            self._name_in_peft(name)
            self._delete(self._loaded.pop(name))
            return
        self._loaded[name] = self._added(request)
        if old is not None:
            self._delete(old)

    def close(self) -> None:
        """Remove from the owner's model what was loaded here."""
        while self._loaded:
            self._delete(self._loaded.popitem()[1])

    def _names_of_owner(self) -> list[str]:
        known = getattr(self._engine.module, "peft_config", {})
        return [name for name in known if not name.startswith(PREFIX)]

    def _name_in_peft(self, name: str) -> str:
        known = self._names_of_owner()
        if name not in self._loaded and name not in known:
            raise unknown_adapter(name, [*known, *self._loaded])
        return self._loaded.get(name, name)

    @contextmanager
    def _kept(self) -> Iterator[dict[nn.Parameter, bool]]:
        """Restore the active adapters and `requires_grad`, which it yields, afterwards. Switch off layers that were
        added inside.
        """
        module: Any = self._engine.module
        layers = {layer: (layer.active_adapter, layer.disable_adapters) for layer in _layers(module)}
        if any(layer.merged_adapters for layer in layers):
            raise InvalidRequestError(
                "adapter: adapters are merged into the weights of the model object, so that they cannot be switched; "
                "call model.unmerge_adapter() first",
                field="adapter",
            )
        holders = [] if module is self._engine.base else [module, module.base_model]
        active = [(holder, holder.active_adapter) for holder in holders]
        trained = {parameter: parameter.requires_grad for parameter in module.parameters()}
        parts = set(module.modules())
        try:
            yield trained
        finally:
            known = getattr(self._engine.module, "peft_config", {})
            for layer in _layers(self._engine.module):
                # In a layer that is new, no adapter of the owner has anything to do.
                name, disabled = layers.get(layer, (layer.active_adapter, True))
                if layer.disable_adapters != disabled:
                    layer.enable_adapters(not disabled)
                if layer.active_adapter != name and _are_in(known, name):
                    layer.set_adapter(name)
            for holder, name in active:
                if _are_in(known, name):
                    holder.active_adapter = name
            for part in self._engine.module.modules():
                if part not in parts:
                    part.training = self._engine.base.training
            _set_trained(self._engine.module, trained)

    def _added(self, request: WeightUpdate) -> str:
        import peft

        field = "path" if request.state_dict is None else "state_dict"
        state, values = _source(request)
        name = f"{PREFIX}{self._count}"
        self._count += 1
        cuda = [self._engine.device] if self._engine.device.type == "cuda" else []
        try:
            # New adapters begin with random values.
            with self._kept(), torch.random.fork_rng(cuda):
                config = _config(values, self._engine.base)
                tied = getattr(self._engine.base.config, "tie_word_embeddings", False)
                if tied and config.peft_type == "TRAINABLE_TOKENS" and getattr(self._engine.module, "peft_config", {}):
                    raise CapabilityError(
                        "PEFT holds one adapter of trainable tokens if embeddings are tied, and no other next to it; "
                        "unload that one first",
                        capability="adapters",
                    )
                if self._engine.module is self._engine.base:
                    self._engine.module, self._wrapped_here = peft.get_peft_model(self._engine.base, config, name), True
                else:
                    wrapper: Any = self._engine.module
                    wrapper.add_adapter(name, config)
                if problems := _load(self._engine.module, state, name):
                    raise ValueError(first_few(problems))
        except BaseException as error:
            self._delete(name)
            if not isinstance(error, Exception) or is_device_failure(error):
                raise
            if isinstance(error, (CapabilityError, InvalidRequestError)):
                raise
            raise InvalidRequestError(
                f"{field}: this adapter does not fit {type(self._engine.base).__name__}: {described(error)}. Give one "
                "that was trained on this model",
                field=field,
            ) from error
        return name

    def _delete(self, name: str) -> None:
        module: Any = self._engine.module
        if name not in getattr(module, "peft_config", {}):
            return
        with self._kept():
            module.delete_adapter(name)
            if self._wrapped_here and not module.peft_config:
                # PEFT cannot run a model that it has wrapped without an adapter.
                self._engine.module, self._wrapped_here = module.unload(), False


def may_have_adapters(engine: CausalLM, *, owns_model: bool) -> bool:
    """Return whether adapters can be added to the model: to one of PEFT, and to one that was loaded here."""
    if engine.module is not engine.base:
        return True
    if not owns_model or getattr(engine.base, "peft_config", None):
        return False
    from importlib.util import find_spec

    return find_spec("peft") is not None


def _layers(module: nn.Module) -> list[Any]:
    """Return the layers of PEFT: those with adapters, and those of which an adapter keeps a copy."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return [part for part in module.modules() if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def _set_trained(module: nn.Module, trained: Mapping[nn.Parameter, bool]) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(trained.get(parameter, False))


def _load(model: Any, state: Mapping[str, Tensor], name: str) -> list[str]:
    """Load the tensors of an adapter that was added under this name, and return what does not fit.

    A file need not hold what PEFT makes itself, such as the random projections of VeRA, so what PEFT would save is
    compared with it. It may hold base weights: those of embeddings that an adapter changes, and biases.
    """
    import peft

    own = model.state_dict()
    saved = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    base = state.keys() & own.keys()
    if changed := [key for key in sorted(base) if not torch.equal(state[key].to(own[key]), own[key])]:
        return [f"other base weights {key!r}" for key in changed]
    report: Any = peft.set_peft_model_state_dict(
        model, {key: tensor for key, tensor in state.items() if key not in base}, adapter_name=name
    )
    # With `save_embedding_layers`, PEFT saves what it trained of embeddings twice.
    twice = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=bool(report.unexpected_keys))
    problems = [
        f"unexpected {each!r}"
        for each in report.unexpected_keys
        if each not in twice or not torch.equal(state[each].to(twice[each]), twice[each])
    ]
    if any(f".{name}" in each for each in report.missing_keys):
        problems += [f"missing {each!r}" for each in saved if each not in state]
    return problems


def _refuse_unswitchable(config: Any, base: nn.Module, *, active: bool = False) -> None:
    """Refuse an adapter without which the model is not the base model again, or that cannot be chosen for one call.

    `active` says whether it is the adapter to run with.
    """
    why = _NOT_SWITCHED.get(config.peft_type) or ("" if active else _changes_base(config, base))
    if config.is_prompt_learning:
        why = "it adds virtual tokens, which are not supported"
    if why:
        raise CapabilityError(
            f"an adapter cannot be switched on and off: {why}. Use a plain LoRA (save_pretrained writes one if it is "
            "given path_initial_model_for_weight_conversion), or open the PEFT model itself and leave adapter= out",
            capability="adapters",
        )


def _refuse_rewriting(module: Any) -> None:
    """Refuse to run an adapter of PEFT that is written into the weights for each forward and taken out again."""
    if any(getattr(config, "target_parameters", None) for config in getattr(module, "peft_config", {}).values()):
        layers = [layer for layer in _layers(module) if type(layer).__name__ == "ParamWrapper"]
        if any(not layer.disable_adapters and not layer.merged for layer in layers):
            raise CapabilityError(
                "target_parameters of a LoRA change the weights while the model runs, so nobody can tell whether they "
                "were changed by others; call model.merge_and_unload() and open the result",
                capability="adapters",
            )


def _changes_base(config: Any, base: nn.Module) -> str:
    """Return how an adapter changes the base weights in place; "" if it does not."""
    begun, bias = getattr(config, "init_lora_weights", True), getattr(config, "bias", "none")
    options = [name for name in _OPTIONS_THAT_CHANGE_BASE if getattr(config, name, None)]
    if isinstance(begun, str) and begun.lower().startswith(CHANGES_BASE):
        options.append(f"init_lora_weights={begun!r}")
    if bias != "none" and any(name.endswith(".bias") and "lora_" not in name for name, _ in base.named_parameters()):
        options.append(f"bias={bias!r}")
    return f"{options[0]} changes the base weights" if options else ""


def _are_in(known: Mapping[str, Any], names: str | list[str]) -> bool:
    return {names} <= known.keys() if isinstance(names, str) else {*names} <= known.keys()


def _config(values: Mapping[str, Any], base: nn.Module) -> Any:
    import peft

    config = peft.PeftConfig.from_peft_type(**values)
    _refuse_unswitchable(config, base)
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True
    config.inference_mode = True
    return config


def _source(request: WeightUpdate) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Return the tensors and the configuration of an adapter."""
    if request.state_dict is not None:
        # Sharded tensors are gathered one at a time.
        return {name: whole_tensor(tensor) for name, tensor in request.state_dict.items()}, request.adapter_config or {}
    from peft.utils import load_peft_weights

    folder = request.path
    assert folder is not None
    try:
        values = json.loads((folder / "adapter_config.json").read_text())
        if not any(Path(folder, f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin")):
            raise FileNotFoundError(folder / "adapter_model.safetensors")
        return load_peft_weights(str(folder), device="cpu"), values
    except Exception as error:
        raise no_adapter(folder, error) from error
