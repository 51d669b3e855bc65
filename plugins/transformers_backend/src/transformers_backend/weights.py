"""`load`: new weights for a model that is in use. Every tensor is checked before the first one is written."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from corelm.errors import EngineError, InvalidRequestError
from corelm.spec import WeightUpdate, as_in_checkpoint, saved_shapes, whole_tensor
from corelm.validate import invalid
from corelm_engine_kit import refuse_weights, shape_problems, shapes_of
from transformers_backend.adapters import PREFIX
from transformers_backend.engine import CausalLM


def load(engine: CausalLM, request: WeightUpdate) -> None:
    """Copy the weights of `request` into the model. Its devices, dtypes and `requires_grad` stay as they are.

    If its owner has changed the weights, they are there already.

    Raises:
        InvalidRequestError: names are missing or unknown, shapes or tied weights differ, or there is nothing to read.
            Nothing has changed.
        EngineError: as above, but tensors of the stream were copied before. The weights are partly new.
    """
    if request.stream is not None:
        _load_stream(engine, request.stream)
    elif request.state_dict is not None:
        _copy(engine, _under_own_names(engine, request.state_dict, "state_dict"), "state_dict")
    elif request.path is not None:
        _copy(engine, _read(engine, request.path), "path")


def _load_stream(engine: CausalLM, stream: Iterator[tuple[str, Tensor]]) -> None:
    """Copy each tensor of a stream as it comes, so that none is held twice. Errors are those of `load`."""
    namings = _namings(engine)
    if not saved_shapes(engine.base).keys() <= namings[-1].keys():
        # The checkpoint has other names than the module: fused experts, for example, are made from many
        # tensors. The memory of one may be used for the next.
        given = {name: tensor.to("cpu", copy=True) for name, tensor in stream}
        _copy(engine, _under_own_names(engine, given, "weights"), "weights")
        return
    own: dict[str, Tensor] = {}
    copied: set[str] = set()
    by_storage: dict[tuple[int, torch.Size], str] = {}
    try:
        for name, tensor in stream:
            # The first name tells which names they are: those of a PEFT model, or those of the model inside.
            own = own or next((names for names in namings if name in names), namings[0])
            known = {name: tuple(own[name].shape)} if name in own else {}
            refuse_weights(shape_problems({name: tuple(tensor.shape)}, known), "weights")
            twin = by_storage.setdefault(_storage(own[name]), name)
            if twin != name and not torch.equal(own[name], tensor.to(own[name])):
                refuse_weights([_differ(twin, name)], "weights")
            with torch.no_grad():
                own[name].copy_(tensor)
            copied.add(name)
        own = own or namings[0]
        # Of weights that are tied, one name is enough.
        missing = [name for name in own if name not in copied and _storage(own[name]) not in by_storage]
        refuse_weights([f"missing {name!r}" for name in sorted(missing)], "weights")
    except InvalidRequestError as error:
        if not copied:
            raise
        raise EngineError(
            f"the weights are partly new: {len(copied)} tensors were copied before this: {error}. Call update_weights "
            "again with all of them",
            usable=True,
        ) from error


def _copy(engine: CausalLM, given: Mapping[str, Tensor], field: str) -> None:
    """Copy `given` into the model by name: its own names, or the plain names of the model inside a PEFT wrapper."""
    own = max(_namings(engine), key=lambda names: len(names.keys() & given.keys()))
    problems = []
    by_storage: dict[tuple[int, torch.Size], str] = {}
    for name in sorted(own.keys() & given.keys()):
        twin = by_storage.setdefault(_storage(own[name]), name)
        if twin != name and not _equal(given[twin], given[name]):
            problems.append(_differ(twin, name))
    # Of weights that are tied, one name is enough.
    expected = {name: value for name, value in own.items() if name in given or _storage(value) not in by_storage}
    refuse_weights([*shape_problems(shapes_of(given), shapes_of(expected)), *problems], field)
    with torch.no_grad():
        for name, value in given.items():
            # One at a time: a sharded tensor is gathered, and all of them at once may not fit into memory.
            own[name].copy_(whole_tensor(value))


def _differ(twin: str, name: str) -> str:
    return f"{twin!r} and {name!r} are the same tensor in this model, but differ here"


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(whole_tensor(one).to("cpu"), whole_tensor(other).to("cpu"))


def _read(engine: CausalLM, path: Path) -> Mapping[str, Tensor]:
    """Read a folder that `save_pretrained` wrote (shards included), or one file of tensors under the model's names."""
    if not path.exists():
        raise invalid("path", f"there is nothing at {path}; give a folder or a file of weights")
    if not path.is_file():
        return _translated(engine, path, "path")
    if path.suffix == ".safetensors":
        return load_file(path)
    tensors: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return tensors


def _under_own_names(engine: CausalLM, given: Mapping[str, Tensor], field: str) -> Mapping[str, Tensor]:
    """Return `given` under the names of the model if it has those of the model's checkpoint, else as it is."""
    own = max(_namings(engine), key=lambda names: len(names.keys() & given.keys()))
    if given.keys() <= own.keys():
        return given
    # On the meta device, converting costs neither time nor memory.
    empty = {name: tensor.detach().to("meta") for name, tensor in _namings(engine)[-1].items()}
    expected = shapes_of(as_in_checkpoint(engine.base, empty))
    if len(given.keys() & expected.keys()) <= len(given.keys() & own.keys()):
        return given
    tied = {name for name in engine.base.all_tied_weights_keys if name not in given}
    refuse_weights(
        shape_problems(shapes_of(given), {name: shape for name, shape in expected.items() if name not in tied}),
        field,
    )
    return _translated(engine, given, field)


def _translated(engine: CausalLM, source: Path | Mapping[str, Tensor], field: str) -> Mapping[str, Tensor]:
    """Return the weights of a checkpoint, a folder or its tensors, under the names of the model. Experts may be stored
    one by one, for example.
    """
    fresh, report = type(engine.base).from_pretrained(
        source if isinstance(source, Path) else None,
        state_dict=None if isinstance(source, Path) else dict(source),
        config=copy.deepcopy(engine.base.config),
        dtype=engine.base.dtype,
        weights_only=True,
        local_files_only=True,
        output_loading_info=True,
    )
    refuse_weights(
        [f"{kind[:-5]} {name!r}" for kind in ("missing_keys", "unexpected_keys") for name in sorted(report[kind])],
        field,
    )
    state_dict: Mapping[str, Tensor] = fresh.state_dict()
    return state_dict


def _namings(engine: CausalLM) -> list[dict[str, Tensor]]:
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


def _storage(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
