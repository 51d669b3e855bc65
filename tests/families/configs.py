"""`build`: a tiny random model of a model type of transformers, from a tiny configuration."""

import dataclasses
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import small, weights

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(model_type: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of that type. `changes` are fields of its text configuration, if it has one."""
    return random_model(config(model_type, **changes))


def random_model(
    config: PreTrainedConfig, model_class: Any = AutoModelForCausalLM, *, seed: int = 0
) -> PreTrainedModel:
    """Return a model of that configuration with random weights that make an error visible."""
    torch.manual_seed(seed)
    create = getattr(model_class, "from_config", None) or model_class._from_config
    model: PreTrainedModel = create(config, dtype=torch.float32).eval()
    weights.widen(model)
    return model


def config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return a tiny configuration of that type. `changes` are fields of its text configuration, if it has one."""
    return configuration(CONFIG_MAPPING[model_type], **changes)


def configuration(config_class: Any, **changes: Any) -> PreTrainedConfig:
    """Return a tiny configuration of that class, with tiny parts."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    sizes = {name: value for name, value in small.FIELDS.items() if name in fields}
    if fields & small.PATTERNS:
        sizes |= {name: 4 for name in ("num_hidden_layers", "num_layers") if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= small.TYPES.get(config_class.model_type, {})
    for name, part_class in _parts(config_class).items():
        part = sizes.get(name, {})
        if name == "text_config":
            part, changes = part | changes, {}
        sizes[name] = configuration(part_class, **part)
    return config_class(**(sizes | changes))


def _parts(config_class: Any) -> dict[str, Any]:
    names = getattr(config_class, "sub_configs", {})
    if not names:
        return {}
    # Which text model goes with a vision tower is often in the defaults only.
    usual = config_class()
    parts = {name: getattr(usual, name, None) for name in names}
    return {name: type(part) for name, part in parts.items() if isinstance(part, PreTrainedConfig)}
