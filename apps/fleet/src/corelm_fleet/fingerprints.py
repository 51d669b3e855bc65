"""`Fingerprint`: a few elements of the weights that were handed to an engine, to tell whether the next ones differ."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corelm.errors import brief, described
from corelm.spec import WeightUpdate

_log = logging.getLogger(__name__)

#: Most tensors to look into.
_TENSORS = 256
#: How many pieces are read of each tensor, and how many elements of each piece.
_PIECES, _ELEMENTS = 16, 4
#: Fewest elements of a tensor: fewer say little about it.
_FEWEST = 16
#: Tensors differ much if this part of the elements does: one may be an embedding of which only some rows are new.
#: Weights differ much if that part of their tensors does.
_OF_ELEMENTS, _OF_TENSORS = 1 / 4, 1 / 2

#: The names of floating-point dtypes in safetensors.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

#: Elements by the name of their tensor.
Fingerprint = Mapping[str, Tensor]


def fingerprint(update: WeightUpdate) -> Fingerprint | None:
    """Return elements of the weights of `update`; None if they cannot be read here.

    They are rounded to bfloat16, in which many engines keep weights.
    """
    try:
        if update.state_dict is not None:
            return dict(_of_tensors(update.state_dict))
        return None if update.path is None else dict(_of_files(update.path))
    except Exception as error:
        # The canary also works without a fingerprint. If the weights are at fault, the engine refuses them.
        _log.debug("no fingerprint of the weights: %s", brief(described(error)))
        return None


def differ_much(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether no engine could answer alike, to the last bit, with both weights.

    Weights that are new in a few elements can: the probes may not need them, or the engine may keep fewer digits.
    """
    both = [name for name in one.keys() & other.keys() if one[name].shape == other[name].shape]
    changed = [name for name in both if float((one[name] != other[name]).float().mean()) >= _OF_ELEMENTS]
    return bool(both) and len(changed) >= _OF_TENSORS * len(both)


def _of_tensors(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    # Reading an element of a sharded tensor would be a call to the other ranks.
    usable = [
        name
        for name, tensor in state_dict.items()
        if type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point() and tensor.numel() >= _FEWEST
    ]
    for name in _few(sorted(usable)):
        tensor = state_dict[name].detach()
        yield name, _pieces(tensor, tensor.shape)


def _of_files(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in _few(files):
        with safe_open(file, framework="pt") as tensors:
            for name in _few(sorted(tensors.keys())):
                part = tensors.get_slice(name)
                shape = part.get_shape()
                if math.prod(shape) >= _FEWEST and part.get_dtype() in _FLOATS:
                    yield name, _pieces(part, shape)


def _pieces(tensor: Any, shape: Sequence[int]) -> Tensor:
    """Return elements from all over a tensor, or a slice of safetensors: the same ones of both."""
    found = []
    for number in range(_PIECES):
        # One piece for each of as many rows, each further right than the one before.
        row = tuple(size * (2 * number + 1) // (2 * _PIECES) for size in shape[:-1])
        start = max(0, shape[-1] - _ELEMENTS) * number // (_PIECES - 1)
        place = (*(slice(index, index + 1) for index in row), slice(start, start + _ELEMENTS))
        found.append(tensor[place].flatten())
    return torch.cat(found).to("cpu", torch.bfloat16)


def _few(items: Sequence[Any]) -> Sequence[Any]:
    return items[:: max(1, -(-len(items) // _TENSORS))]
