"""`Adapters`: adapters of PEFT that are loaded, replaced and unloaded by name, and the one that a call runs with.

PEFT changes `requires_grad` when it switches an adapter, and the owner of a model relies on what is active. So a call
switches the layers themselves, and puts everything back. An adapter is never changed in place: a new one is added under
a name of its own, and the old one is removed when that has worked.
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
from corelm.spec import GenerateRequest, ScoreRequest, WeightUpdate
from corelm.support import whole_tensor
from transformers_backend.engine import CausalLM, is_device_failure, runs_layers_again

#: How the names begin that PEFT knows these adapters by.
PREFIX = "corelm_adapter_"
#: Ways to begin a LoRA that also change the base weights, by the beginnings of their names.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


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
    def switched(self, request: GenerateRequest | ScoreRequest) -> Iterator[None]:
        """Run the model with the adapter of a request inside.

        Raises:
            InvalidRequestError: there is no such adapter, or adapters are merged into the weights.
            CapabilityError: layers would run again in the backward pass, when the adapter is no longer switched on.
        """
        if request.adapter is None:
            yield
            return
        name = None if request.adapter is False else self._name_in_peft(request.adapter)
        layers = _layers(self._engine.module)
        if any(getattr(layer, "merged_adapters", None) for layer in layers):
            raise InvalidRequestError(
                "adapter: adapters are merged into the weights of the model object, so that they cannot be switched; "
                "call model.unmerge_adapter() first",
                field="adapter",
            )
        if isinstance(request, ScoreRequest) and request.grad and runs_layers_again(self._engine.module):
            raise CapabilityError(
                "adapter= and gradient checkpointing exclude each other: layers run again in the backward pass, when "
                "the adapter is switched back. Call model.set_adapter yourself and leave adapter= out",
                capability="adapters",
            )
        with self._kept():
            for layer in layers:
                layer._disable_adapters = name is None
                if name is not None:
                    layer._active_adapter = [name]
            if name is not None:
                for holder in self._holders():
                    holder.active_adapter = name
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
        return sorted(name for name in known if not name.startswith(PREFIX))

    def _name_in_peft(self, name: str) -> str:
        if name in self._loaded:
            return self._loaded[name]
        known = self._names_of_owner()
        if name in known:
            return name
        known = sorted([*known, *self._loaded])
        others = f"there are {', '.join(map(repr, known))}" if known else "no adapter is loaded"
        raise InvalidRequestError(
            f"adapter: there is no {name!r}; {others}. Call load_adapter({name!r}, …) first",
            field="adapter",
        )

    def _holders(self) -> list[Any]:
        """Return the objects of PEFT that know the active adapter, apart from its layers."""
        module: Any = self._engine.module
        return [] if module is self._engine.base else [module, module.base_model]

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Put back afterwards which adapters are active, and what is trained. Layers that are new are switched off."""
        module = self._engine.module
        layers = {layer: (layer._active_adapter, layer._disable_adapters) for layer in _layers(module)}
        active = [(holder, holder.active_adapter) for holder in self._holders()]
        trained = {parameter: parameter.requires_grad for parameter in module.parameters()}
        parts = set(module.modules())
        try:
            yield
        finally:
            for layer in _layers(self._engine.module):
                # In a layer that is new, no adapter of the owner has anything to do.
                layer._active_adapter, layer._disable_adapters = layers.get(layer, ([], True))
            for holder, name in active:
                holder.active_adapter = name
            for part in self._engine.module.modules():
                if part not in parts:
                    part.training = self._engine.base.training
            for parameter in self._engine.module.parameters():
                parameter.requires_grad_(trained.get(parameter, False))

    def _added(self, request: WeightUpdate) -> str:
        """Add the adapter under a new name, and return that name."""
        import peft

        field = "path" if request.state_dict is None else "state_dict"
        state, values = _source(request)
        name = f"{PREFIX}{self._count}"
        self._count += 1
        cuda = [self._engine.device] if self._engine.device.type == "cuda" else []
        try:
            # New adapters begin with random values.
            with self._kept(), torch.random.fork_rng(cuda):
                config = _config(values)
                if self._engine.module is self._engine.base:
                    self._engine.module, self._wrapped_here = peft.get_peft_model(self._engine.base, config, name), True
                else:
                    wrapper: Any = self._engine.module
                    wrapper.add_adapter(name, config)
                report: Any = peft.set_peft_model_state_dict(self._engine.module, state, adapter_name=name)
                missing = [each for each in report.missing_keys if f".{name}" in each]
                problems = [f"unexpected {each!r}" for each in report.unexpected_keys]
                problems += [f"missing {each.replace(f'.{name}', '')!r}" for each in missing]
                if problems:
                    raise ValueError(first_few(problems))
        except BaseException as error:
            self._delete(name)
            if not isinstance(error, Exception) or isinstance(error, CapabilityError) or is_device_failure(error):
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
        if self._wrapped_here and module.active_adapter not in module.peft_config:
            for holder in self._holders():
                holder.active_adapter = next(iter(module.peft_config))


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


def _config(values: Mapping[str, Any]) -> Any:
    """Return PEFT's configuration of an adapter that is to be used and not trained."""
    import peft

    config = peft.PeftConfig.from_peft_type(**values)
    if config.is_prompt_learning:
        raise CapabilityError(
            "this adapter adds virtual tokens, which are not supported; use LoRA", capability="adapters"
        )
    begun = getattr(config, "init_lora_weights", True)
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise CapabilityError(
            f"init_lora_weights={begun!r} changes the base weights, so the adapter does not fit those of the engine; "
            "save it as a plain LoRA (path_initial_model_for_weight_conversion of save_pretrained)",
            capability="adapters",
        )
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True
    config.inference_mode = True
    return config


def _source(request: WeightUpdate) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Return the tensors and the configuration of an adapter.

    Raises:
        InvalidRequestError: the folder has no adapter; `field` is ``path``.
    """
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
        raise InvalidRequestError(
            f"path: there is no readable adapter in {folder} ({described(error)}); give a folder that save_pretrained "
            "of a PEFT model wrote",
            field="path",
        ) from error
