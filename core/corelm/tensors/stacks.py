"""Rows and Python objects as tensordict's lazy stacks, every row made at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from corelm.tensors.ragged import Ragged

T = TypeVar("T")
Shape = tuple[int, ...]
#: Tensors as `Ragged`, or one Python object a row; in C order of the batch.
Field = Ragged | Sequence[Any]


def stack_rows(fields: Mapping[str, Field], shape: Shape) -> LazyStackedTensorDict:
    """Return a lazy stack of batch `shape` with one TensorDict a row.

    Each row of each field gets its own storage. Gradients reach the fields even when the caller has turned them off.
    """
    with torch.inference_mode(False), torch.enable_grad():
        columns = [_copies(field) if isinstance(field, Ragged) else _carriers(field) for field in fields.values()]
    rows = [TensorDict(dict(zip(fields, row, strict=True)), batch_size=()) for row in zip(*columns, strict=True)]
    return _stacked(rows, shape, LazyStackedTensorDict)


def stack_objects(values: Sequence[Any], shape: Shape) -> NonTensorData | NonTensorStack:
    """Return a stack of batch `shape` with one Python object a row."""
    return _stacked(_carriers(values), shape, NonTensorStack)


def nested(flat: Iterator[Any], shape: Shape) -> Any:
    """Return the items, which come in C order of `shape`, as lists within lists."""
    return [nested(flat, shape[1:]) for _ in range(shape[0])] if shape else next(flat)


def _stacked(rows: Sequence[T], shape: Shape, stack: Callable[..., Any]) -> Any:
    """Stack rows, which come in C order of `shape`, as lazy stacks within lazy stacks."""
    level: Sequence[Any] = rows
    for width in reversed(shape):
        level = [stack(*level[at : at + width]) for at in range(0, len(level), width)]
    return level[0]


def _copies(rows: Ragged) -> Sequence[Tensor]:
    # Not views: a row that is kept in a replay buffer or sent elsewhere must not take its whole batch along.
    return torch.split_with_sizes_copy(rows.values, rows.lengths.tolist())  # type: ignore[func-returns-value,return-value]


def _carriers(values: Sequence[Any]) -> Sequence[NonTensorData]:
    """Return one carrier for each value. Carriers are not shared, because tensordict writes to them in place."""
    first = next(iter(values))
    # Unbinding one carrier costs half as much as making them one by one, and less if the value stays the same.
    carriers: Sequence[NonTensorData] = NonTensorData(first, batch_size=(len(values),)).unbind(0)
    for carrier, value in zip(carriers, values, strict=True):
        if value is not first:
            carrier.data = value
    return carriers
