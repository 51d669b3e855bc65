"""The names of a model's weights in its checkpoint. Those inside the module may differ: transformers 5 fuses experts.

Core does not import transformers. If the model comes from transformers, the caller has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def as_in_checkpoint(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors `named` as in the module under the names that `save_pretrained` would give them."""
    modeling = sys.modules.get("transformers.modeling_utils")
    # Since transformers 5, which fuses weights. Before, a module has the names of its checkpoint.
    loading: Any = sys.modules.get("transformers.core_model_loading")
    if modeling is None or loading is None or not isinstance(model, modeling.PreTrainedModel):
        return dict(named)
    converted: dict[str, Tensor] = loading.revert_weight_conversion(model, dict(named))
    return converted


def saved_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that `save_pretrained` would write of a model. Tied weights have one name.

    A model on the meta device has them, too: so they are known for a checkpoint that has a configuration and
    no weights.
    """
    once: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        once.setdefault(id(tensor), (name, tensor))
    # Converted on the meta device, which costs neither time nor memory.
    empty = {name: tensor.detach().to("meta") for name, tensor in once.values()}
    return {name: tuple(tensor.shape) for name, tensor in as_in_checkpoint(model, empty).items()}


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, and gathered from all ranks if it is sharded (a DTensor, as FSDP2 makes them).

    Gathering is a call to all ranks of the tensor's mesh: each of them must make it, and in the same order.
    """
    sharded: Any = tensor.detach()
    if not hasattr(sharded, "full_tensor"):
        return sharded
    # Shards that are offloaded to the CPU belong to a mesh of GPUs, whose backend gathers nothing on a CPU.
    gathered: Tensor = sharded.to(sharded.device_mesh.device_type).full_tensor()
    return gathered
