"""What `update_weights` and `load_adapter` are given, as an engine is sent it: under the names of a checkpoint.

The names inside a module differ from those of its checkpoint: transformers 5 fuses the experts of a layer, PEFT
keeps adapters next to the weights that they change, `torch.compile` and DDP put a prefix before each name.

Core imports neither transformers nor PEFT. If a model comes from one of them, the caller has imported it already.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from corelm.errors import CoreLMError, described
from corelm.spec.checkpoints import as_in_checkpoint, whole_tensor
from corelm.spec.provenance import Adapter
from corelm.validate import invalid, shown

#: What `update_weights` takes.
NewWeights: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | nn.Module | str | os.PathLike[str]
#: What `load_adapter` takes: a state dict with the names that ``peft.get_peft_model_state_dict`` gives, a
#: PEFT model, or a folder that PEFT's `save_pretrained` wrote.
NewAdapter: TypeAlias = Mapping[str, Tensor] | nn.Module | str | os.PathLike[str]

#: Wrappers that hold the model as their only child, under one of these names: torch.compile; DDP and others.
_WRAPPED_AS = ("_orig_mod", "module")
#: Ends the name of an adapter in labels and in paths of HTTP servers.
_NOT_IN_NAMES = frozenset("@+/\\")


def checked_adapter(given: Any) -> Adapter:
    """Return the adapter of a call: a name, False or None. Errors are those of `checked_name`."""
    return None if given is None else False if given is False else checked_name(given)


def checked_name(given: Any) -> str:
    """Return the name of an adapter, or refuse what is none."""
    if not isinstance(given, str) or not given.strip() or not given.isprintable() or _NOT_IN_NAMES & {*given}:
        raise invalid("adapter", f"expected the name of an adapter, without @ + / \\, got {shown(given)}")
    return given


def source_of_weights(weights: NewWeights, streams: bool) -> dict[str, Any]:
    """Return the field of a `WeightUpdate` that says where the base weights come from.

    An engine that `streams` takes an iterator one by one; for others it is read to its end.
    """
    if isinstance(weights, (str, os.PathLike)):
        return {"path": Path(weights)}
    if isinstance(weights, nn.Module):
        return {"state_dict": weights_of(weights)}
    if isinstance(weights, Mapping):
        return {"state_dict": weights}
    if isinstance(weights, Iterable):
        return {"stream": checked_pairs(weights)} if streams else {"state_dict": collected(weights)}
    expected = "expected a state dict, a model, a path, or an iterator of (name, tensor)"
    raise invalid("weights", f"{expected}, got {type(weights).__name__}")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model by the names that `save_pretrained` would give them. The model is not changed.

    It is a model of transformers, a PEFT model around one, whose adapters are merged in a copy, or either in a
    wrapper (`torch.compile`, DDP). Another module gives its `state_dict`. Tensors are shared with the model wherever
    names and values are the module's own. A tied tensor keeps both its names: a checkpoint may have either.
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

    An `InvalidRequestError` says that an item is not a name and a tensor, a name comes twice, or the iterator raised.
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
        what = f"a {type(model).__name__} with these adapters cannot be merged"
        good = "a model of peft.get_peft_model with LoRA or other adapters that PEFT can merge, or the merged model"
        raise invalid("weights", f"{what}; pass {good}")
    if any(getattr(module, "disable_adapters", False) is True for module in model.modules()):
        raise invalid("weights", "the adapters are disabled; enable them, or pass the state dict of the base model")
    try:
        # A copy of the structure around the same tensors.
        tensors = [*model.parameters(), *model.buffers()]
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        # Merging writes to the tensors of these layers. Each gets its own: the head may be tied to embeddings
        # that have an adapter, and does not have that adapter.
        layers = {module.get_base_layer() for module in twin.modules() if hasattr(module, "get_base_layer")}
        for module in {inner for layer in layers for inner in layer.modules()}:
            for name, tensor in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(tensor.detach().clone(), requires_grad=False))
        merged: nn.Module = twin.merge_and_unload()
    except Exception as error:
        what = f"PEFT could not merge the adapters ({described(error)})"
        raise invalid("weights", f"{what}; pass the merged model, or its path") from error
    return merged


def source_of_adapter(
    name: str, weights: NewAdapter, config: Any, last_config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of a `WeightUpdate` that say where an adapter comes from.

    `config` is the configuration of a state dict; None for `last_config`, that of the last adapter of this name.
    """
    if isinstance(weights, (str, os.PathLike, nn.Module)) and config is not None:
        where = "model" if isinstance(weights, nn.Module) else "folder"
        raise invalid("config", f"leave it out: the {where} has the adapter's configuration")
    if isinstance(weights, (str, os.PathLike)):
        return {"path": Path(weights)}
    if isinstance(weights, nn.Module):
        state, own = _of_peft_model(name, weights)
        return {"state_dict": state, "adapter_config": own}
    if not isinstance(weights, Mapping):
        raise invalid("weights", f"expected a folder, a PEFT model or a state dict, got {type(weights).__name__}")
    found = last_config if config is None else _plain_config(config)
    if found is None:
        give = "give config=, as in config=peft_model.peft_config['default'], or give the PEFT model or its folder"
        raise invalid("config", f"a state dict does not say what its adapter is; {give}")
    return {"state_dict": weights, "adapter_config": found}


def _plain_config(config: Any) -> dict[str, Any]:
    """Return PEFT's configuration of an adapter, or what its ``to_dict()`` returned, in plain JSON values."""
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise invalid("config", f"expected a LoraConfig, or a mapping of its fields, got {shown(config)}")
    return {str(name): _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _of_peft_model(name: str, model: Any) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Return the state dict and the configuration of the adapter of this name in a PEFT model, or of the active one."""
    model = unwrapped(model)
    peft = sys.modules.get("peft")
    known = getattr(model, "peft_config", None)
    if peft is None or not isinstance(known, Mapping) or not hasattr(model, "active_adapters"):
        raise invalid("weights", f"a {type(model).__name__} has no adapter; give a model of peft.get_peft_model")
    # A method in transformers, and a property in PEFT.
    active = model.active_adapters
    names = [name] if name in known else active() if callable(active) else active
    if len(names) != 1:
        raise invalid("weights", f"the model has {len(names)} active adapters and none called {name!r}")
    (chosen,) = names
    with torch.no_grad():
        state = peft.get_peft_model_state_dict(model, adapter_name=chosen, save_embedding_layers=False)
    return state, _plain_config(known[chosen])
