"""The names by which the tensors of a model are known, and which of them are one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformers_backend.adapters import PREFIX
from transformers_backend.engine import CausalLM


def namings(engine: CausalLM) -> list[dict[str, Tensor]]:
    """Return the complete sets of names by which the model's tensors are known."""
    # Adapters that were loaded by name have updates of their own.
    own: dict[str, Tensor] = {
        name: tensor for name, tensor in engine.module.state_dict().items() if f".{PREFIX}" not in name
    }
    if engine.module is engine.base:
        return [own]
    wrapper: Any = engine.module
    plain = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in own.items()
        if wrapper.base_model.prefix not in name
    }
    return [own, plain]


def storage(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
