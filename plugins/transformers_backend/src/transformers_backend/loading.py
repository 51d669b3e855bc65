"""Where the model and the tokenizer come from: loaded from a folder or the hub, or objects that the caller passed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.validate import invalid
from corelm_engine_kit import hub_options, refuse_missing_path, torch_device, torch_dtype

#: Options of `from_pretrained` that say where a configuration is found.
_WHERE = frozenset({"trust_remote_code", "revision", "code_revision", "token", "cache_dir", "subfolder"}) | {
    "local_files_only",
    "force_download",
    "proxies",
}
_BLOCKS = (
    "shards the model, and a rank that makes more forwards than another one would wait forever; open the backend on an "
    "unsharded copy of the model, and after every training step"
)
_STATE_DICT = f"{_BLOCKS} call update_weights(model.state_dict()) on all ranks"
_FULL_STATE_DICT = f"{_BLOCKS} call update_weights with a full state dict"
_ZERO_3 = (
    f"DeepSpeed ZeRO-3 {_BLOCKS} save the weights with engine.save_16bit_model(FOLDER) and call "
    "update_weights('FOLDER/pytorch_model.bin')"
)

#: What to say of classes that cannot be run here, by their package and name: so nothing is imported to recognize them.
_REFUSED = {
    ("torch", "DataParallel"): "DataParallel cuts batches into pieces of any shape; give model.module",
    ("torch", "DistributedDataParallel"): (
        "DistributedDataParallel averages gradients only if its own forward is called; give model.module, and average "
        "the gradients over the ranks yourself if you train through the scores"
    ),
    ("torch", "FullyShardedDataParallel"): f"FullyShardedDataParallel {_FULL_STATE_DICT}",
    ("torch", "FSDPModule"): f"fully_shard {_STATE_DICT}",
    ("deepspeed", "DeepSpeedEngine"): "a DeepSpeedEngine wraps the model for training; give engine.module",
}


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    trust_remote_code: bool,
    attn_implementation: str | None,
    model_kwargs: Mapping[str, Any],
) -> nn.Module:
    """Load a causal language model, or one that also reads images or sound and is used for text here."""
    refuse_missing_path("model", path)
    device = torch_device(device)
    own = {**hub_options(path), **model_kwargs}
    options: dict[str, Any] = {"weights_only": True, **own, "trust_remote_code": trust_remote_code}
    options["dtype"] = torch_dtype(dtype) or "auto"
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with _naming("model", path), _bars_on_terminals_only():
        model: nn.Module = _model_class(path, options).from_pretrained(path, **options)
    if "device_map" in model_kwargs:
        return model
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Let transformers show no progress bars in a pipe or a log, where each frame would be a line."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled() or (sys.stderr is not None and sys.stderr.isatty()):
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def refuse_file(path: str | os.PathLike[str], tokenizer: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse a file as the model, and to read a tokenizer from a GGUF file.

    Transformers ignores the pre-tokenizer of such a file, so ids are wrong.
    """
    alone = os.fspath(path).endswith(".gguf")
    if alone or ("gguf_file" in model_kwargs and tokenizer is None):
        field = "model" if alone else "model_kwargs"
        file = os.fspath(path) if alone else model_kwargs["gguf_file"]
        what = f"{file!r} is a GGUF file, which this backend does not open; open the model that it was made from"
        raise invalid(field, f"{what}: get_backend('transformers', 'FOLDER OR HUB NAME')")
    if os.path.isfile(path):
        folder = os.path.dirname(os.path.abspath(path))
        raise invalid("model", f"{os.fspath(path)!r} is a file, and a model is a folder; give {folder!r}")


def _model_class(path: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    """Return the class of transformers that loads the model at `path`."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
    )

    where = {name: value for name, value in options.items() if name in _WHERE}
    if "gguf_file" in options:
        return AutoModelForCausalLM
    try:
        config = options.get("config") or AutoConfig.from_pretrained(path, **where)
    except (OSError, ValueError):
        # There is no usable config.json: the folder may hold nothing but an adapter, which says where its model is.
        # Transformers asks the hub for that, whatever it is told, so this is not tried without a hub.
        if where.get("local_files_only") and not os.path.exists(path) and not _is_cached_adapter(path, where):
            raise
        return AutoModelForCausalLM
    # A model with code of its own says in `auto_map` which classes can load it.
    own = getattr(config, "auto_map", None) or {}
    for kind, known in (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
        (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
    ):
        if kind.__name__ in own or type(config) in known:
            return kind
    raise CapabilityError(
        f"{path}: transformers has no causal language model for the model type {config.model_type!r}",
        capability="model",
    )


def _is_cached_adapter(path: str | os.PathLike[str], where: Mapping[str, Any]) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(
        try_to_load_from_cache(os.fspath(path), "adapter_config.json", cache_dir=where.get("cache_dir")), str
    )


@contextmanager
def _naming(field: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the failure to load a name that is not a path into one error, without the chain of those of the hub."""
    try:
        yield
    except OSError as error:
        if os.path.exists(path):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise EngineError(
            f"{field}: {os.fspath(path)!r} is not a folder in {os.getcwd()}, and could not be loaded from a hub: "
            f"{first}",
            usable=False,
        ) from None


def refuse_other_options(
    model: Any,
    *,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    attn_implementation: str | None,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Refuse options of loading that differ from what the model object is already; None means "not given"."""
    wanted_dtype, wanted_device = torch_dtype(dtype), torch_device(device)
    has, on = getattr(model, "dtype", None), getattr(model, "device", None)
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    problems = {}
    if wanted_dtype is not None and wanted_dtype != has:
        problems["dtype"] = f"the model object is {has}; convert it with model.to({wanted_dtype}), or leave dtype out"
    if wanted_device is not None and on is not None and not _same_device(wanted_device, on):
        what = f"the model object is on {on}; move it with model.to({str(wanted_device)!r}), or leave device out"
        problems["device"] = what
    if attn_implementation not in (None, attention):
        call = f"call model.set_attn_implementation({attn_implementation!r}), or leave it out"
        problems["attn_implementation"] = f"the model object uses {attention!r}; {call}"
    if model_kwargs:
        what = "only used when a model is loaded, but a model object was passed; leave it out"
        problems["model_kwargs"] = what
    for field, problem in problems.items():
        raise invalid(field, problem)


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index is None or one.index == (other.index or 0))


def base_model(module: Any) -> Any:
    """Return the transformers model without its PEFT wrapper. Refuse one that this backend cannot run."""
    from transformers import PreTrainedModel

    base = module
    if not isinstance(module, PreTrainedModel) and hasattr(module, "get_base_model"):
        if module.active_peft_config.is_prompt_learning:
            raise CapabilityError(
                f"{type(module).__name__} with prompt learning adds virtual tokens, which are not supported; use LoRA",
                capability="model",
            )
        base = module.get_base_model()
    if not isinstance(base, PreTrainedModel) or not base.can_generate() or base.config.is_encoder_decoder:
        raise CapabilityError(
            f"{type(base).__name__} is not a causal language model of transformers", capability="model"
        )
    return base


def load_tokenizer(given: Any, base: Any, trust_remote_code: bool) -> Any:
    """Return `given` itself, or the tokenizer loaded from that folder or hub name; None means the model's own."""
    if given is None:
        given = base.name_or_path
        if not given:
            raise InvalidRequestError("a model object has no tokenizer; pass tokenizer=", field="tokenizer")
    if not isinstance(given, (str, os.PathLike)):
        return given
    from transformers import AutoTokenizer

    refuse_missing_path("tokenizer", given)
    with _naming("tokenizer", given):
        return AutoTokenizer.from_pretrained(given, trust_remote_code=trust_remote_code, **hub_options(given))


# Wrapped and sharded models --------------------------------------------------------------------------------------

# The ranks of a sharded model gather its weights together in every forward. This backend makes as many forwards as the
# rows of its own rank need, so one rank would soon wait for another forever.


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile(model)``, which has the same parameters; any other model as it is.

    It runs without being compiled: rows have new lengths in every call, and torch would compile it again for many.
    A model is refused if it or a part of it is wrapped or sharded for several devices. Nothing is asked of the other
    ranks, so each of them raises.
    """
    while (inner := dict(model.named_children()).get("_orig_mod")) is not None:
        model = inner
    _refuse(model.modules(), model.parameters())
    return model


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model that was sharded in place since it was opened. For every call, so it looks at little."""
    _refuse([model], islice(model.parameters(), 1))


def _refuse(parts: Iterable[nn.Module], weights: Iterable[Any]) -> None:
    """Refuse weights first: a wrapper may hold a model that is refused as well."""
    weights = list(weights)
    if any(hasattr(weight, "ds_id") for weight in weights):
        raise CapabilityError(_ZERO_3, capability="model")
    for kind in dict.fromkeys(map(type, parts)):
        for ancestor in kind.__mro__:
            if why := _REFUSED.get((ancestor.__module__.partition(".")[0], ancestor.__name__)):
                raise CapabilityError(why, capability="model")
    if weights and not weights[0].numel():
        # The inner model of FSDP1, for example.
        raise CapabilityError(
            f"the model's first parameter is empty, so another library {_FULL_STATE_DICT}", capability="model"
        )
