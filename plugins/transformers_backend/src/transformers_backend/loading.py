"""Where the model and the tokenizer come from: loaded from a folder or the hub, or objects that the caller passed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from corelm.errors import CapabilityError, InvalidRequestError

#: Options of `from_pretrained` that say where a configuration is found.
_WHERE = frozenset({"trust_remote_code", "revision", "code_revision", "token", "cache_dir", "subfolder"}) | {
    "local_files_only",
    "force_download",
    "proxies",
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
    """Load a causal language model, or one that also reads images or sound and is used for text here.

    Raises:
        CapabilityError: transformers has no such model for this configuration.
    """
    options: dict[str, Any] = {"weights_only": True, **model_kwargs, "trust_remote_code": trust_remote_code}
    options["dtype"] = dtype or "auto"
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    model: nn.Module = _model_class(path, options).from_pretrained(path, **options)
    if "device_map" in model_kwargs:
        return model
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


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


def refuse_loading_options(**options: Any) -> None:
    """Refuse every option that only applies while a model is loaded; None means "not given".

    Raises:
        InvalidRequestError: an option was given with a model object.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InvalidRequestError(
            f"{', '.join(given)}: only used when a model is loaded, but a model object was passed; "
            "set it on the model itself",
            field=given[0],
        )


def base_model(module: Any) -> Any:
    """Return the transformers model without its PEFT wrapper.

    Raises:
        CapabilityError: the model is not one that this backend can run.
    """
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
    """Return `given` itself, or the tokenizer loaded from that folder or hub name; None means the model's own.

    Raises:
        InvalidRequestError: no tokenizer was given, and the model does not say where it was loaded from.
    """
    if given is None:
        given = base.name_or_path
        if not given:
            raise InvalidRequestError("a model object has no tokenizer; pass tokenizer=", field="tokenizer")
    if not isinstance(given, (str, os.PathLike)):
        return given
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(given, trust_remote_code=trust_remote_code)
