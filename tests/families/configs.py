"""`build`: a tiny random model of a model type of transformers, in eval mode."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import small, weights

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(model_type: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random model of that type. `changes` are fields of its (text) configuration."""
    return random_model(config(model_type, **changes), seed=seed)


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
    """Return a tiny configuration of that type."""
    return configuration(CONFIG_MAPPING[model_type], **(small.TYPES.get(model_type, {}) | changes))


def configuration(config_class: Any, **changes: Any) -> PreTrainedConfig:
    """Return a tiny configuration of that class. If it has a text configuration, `changes` go there."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    sizes = {name: value for name, value in small.FIELDS.items() if name in fields}
    if fields & small.PATTERNS:
        sizes |= {name: 4 for name in ("num_hidden_layers", "num_layers") if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if name == "text_config" and dataclasses.is_dataclass(part):
            sizes[name] = configuration(part, **(small.TYPES.get(part.model_type, {}) | changes)).to_dict()
            changes = {}
    return config_class(**(sizes | changes))
