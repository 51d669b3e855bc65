"""`weights_of`: the weights of a model object under the names of its checkpoint, which is what every engine expects.
`checked_pairs`, `collected`: the weights of an iterator, one by one or all of them.

The names inside a module differ from those of its checkpoint: transformers 5 fuses the experts of a layer, PEFT keeps
adapters next to the weights that they change, `torch.compile` and DDP put a prefix before each name.

Core does not import transformers. If the model comes from transformers, the caller has imported it already.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from corelm.errors import CoreLMError, described
from corelm.spec.checkpoints import as_in_checkpoint, whole_tensor
from corelm.validate import invalid, shown

#: What `update_weights` takes.
NewWeights: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | nn.Module | str | os.PathLike[str]

#: Wrappers that hold the model as their only child, under one of these names: torch.compile; DDP and others.
_WRAPPED_AS = ("_orig_mod", "module")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model by the names that `save_pretrained` would give them. The model is not changed.

    Adapters of PEFT are merged in a copy. Tensors are shared with the model wherever names and values are the module's
    own. A tied tensor keeps both its names: a checkpoint may have either.

    Args:
        model: a model of transformers, a PEFT model around one, or either in a wrapper (`torch.compile`, DDP). Another
            module gives its `state_dict`.

    Raises:
        InvalidRequestError: the adapters cannot be merged, or a tensor has no values; `field` is ``weights``.
    """
    model = unwrapped(model)
    with torch.no_grad():
        if getattr(model, "peft_config", None):
            model = _merged(model)
        # The layers of a model may be compiled one by one.
        named = {name.replace("_orig_mod.", ""): tensor for name, tensor in model.state_dict().items()}
        empty = next((name for name, tensor in named.items() if tensor.is_meta), None)
        if empty is not None:
            raise invalid("weights", f"{empty!r} has no values: it is on the meta device; load or gather it first")
        return as_in_checkpoint(model, named)


def checked_pairs(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of an iterator, each without its graph, and gathered if it is sharded.

    Raises:
        InvalidRequestError: an item is not a name and a tensor, a name comes twice, or the iterator raised; `field` is
            ``weights``.
    """
    found: set[str] = set()
    try:
        for pair in pairs:
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
                raise invalid("weights", f"item {len(found)}: expected a pair (name, tensor), got {shown(pair)}")
            name, tensor = pair
            if not isinstance(tensor, Tensor):
                raise invalid("weights", f"{name!r}: expected a tensor, got {shown(tensor)}")
            if name in found:
                raise invalid("weights", f"{name!r} comes twice; give each tensor once")
            found.add(name)
            yield name, whole_tensor(tensor)
    except CoreLMError:
        raise
    except Exception as error:
        raise invalid("weights", f"the iterator failed after {len(found)} tensors ({described(error)})") from error


def collected(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return a state dict of the names and tensors of an iterator. Each is copied to the CPU before the next is taken.

    So a trainer can gather shards one by one, and use the same memory for each. Errors are those of `checked_pairs`.
    """
    return {name: tensor.to("cpu", copy=True) for name, tensor in checked_pairs(pairs)}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model in `torch.compile`, DDP and the like."""
    while True:
        children = dict(model.named_children())
        if len(children) != 1 or not children.keys() & set(_WRAPPED_AS):
            return model
        (model,) = children.values()


def _merged(model: Any) -> nn.Module:
    """Return the model inside a PEFT model, with the adapters merged into copies of the weights that they change."""
    if not hasattr(model, "merge_and_unload"):
        raise invalid(
            "weights",
            f"a {type(model).__name__} with these adapters cannot be merged; pass a model of peft.get_peft_model with "
            "LoRA or other adapters that PEFT can merge, or the merged model",
        )
    if any(getattr(module, "disable_adapters", False) is True for module in model.modules()):
        raise invalid("weights", "the adapters are disabled; enable them, or pass the state dict of the base model")
    try:
        # A copy of the structure around the same tensors.
        tensors = [*model.parameters(), *model.buffers()]
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        # Merging writes to the tensors of these layers. Each gets its own: the head may be tied to embeddings that have
        # an adapter, and does not have that adapter.
        layers = {module.get_base_layer() for module in twin.modules() if hasattr(module, "get_base_layer")}
        for module in {inner for layer in layers for inner in layer.modules()}:
            for name, tensor in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(tensor.detach().clone(), requires_grad=False))
        merged: nn.Module = twin.merge_and_unload()
    except Exception as error:
        raise invalid(
            "weights", f"PEFT could not merge the adapters ({described(error)}); pass the merged model, or its path"
        ) from error
    return merged
