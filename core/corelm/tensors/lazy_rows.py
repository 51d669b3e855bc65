"""Stacks of tensordict that make their rows on first use.

A row costs one tensor with its own storage for every field, and a TensorDict around them: 15 to 20 µs for tokens, masks
and log-probs. Much of what is done with a batch needs no rows. So `lazy_rows` and `non_tensors` return a stack that
holds only the flat values its rows will be made from. It answers for its shape and its keys, and `flat_source` gives
the flat values to code that can read them. Whatever else tensordict does with a stack reads its state, which is not
there yet: `__getattr__` then makes the rows, and the stack becomes an ordinary one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch.utils import _pytree as pytree

from corelm.tensors.ragged import Ragged

Shape = tuple[int, ...]
#: Tensors as `Ragged`, or one Python object a row; in C order of the batch.
Field = Ragged | Sequence[Any]

#: The entry of a stack's `__dict__` that holds what its rows will be made from.
_SOURCE = "_corelm_source"
#: Two threads that access one stack at once get the same rows.
_MAKING = threading.RLock()


@dataclass(frozen=True, slots=True, eq=False)
class FlatObjects:
    """One Python object a row, in C order of `shape`."""

    values: Sequence[Any]
    shape: Shape

    def make(self) -> NonTensorStack:
        """Return a stack with one Python object a row."""
        return _stacked(_carriers(self.values), self.shape, NonTensorStack)


@dataclass(frozen=True, slots=True, eq=False)
class FlatRows:
    """Fields with one row a sample, held flat, in C order of `shape`."""

    fields: Mapping[str, Field]
    shape: Shape

    def make(self) -> LazyStackedTensorDict:
        """Return a lazy stack with one TensorDict a row.

        Each row of each field gets its own storage: one that is kept in a replay buffer or sent elsewhere must not take
        its batch along. Gradients reach the fields even when the caller has turned them off.
        """
        with torch.inference_mode(False), torch.enable_grad():
            columns: list[Any] = [
                torch.split_with_sizes_copy(one.values, one.lengths.tolist())  # type: ignore[func-returns-value]
                if isinstance(one, Ragged)
                else _carriers(one)
                for one in self.fields.values()
            ]
        each = (dict(zip(self.fields, row, strict=True)) for row in zip(*columns, strict=True))
        return _stacked([TensorDict(row, batch_size=()) for row in each], self.shape, LazyStackedTensorDict)


def lazy_rows(fields: Mapping[str, Field], shape: Shape) -> TensorDictBase:
    """Return a lazy stack of one TensorDict a row. Do not modify `fields` afterwards."""
    if 0 in shape:
        # A stack needs at least one row.
        empty = {
            name: rows.values.reshape(*shape, 0, *rows.values.shape[1:])
            if isinstance(rows, Ragged)
            else non_tensors(rows, shape)
            for name, rows in fields.items()
        }
        return TensorDict(empty, batch_size=shape)
    source = FlatRows(fields, shape)
    if not shape:
        return source.make()
    stack: TensorDictBase = object.__new__(_LAZY[LazyStackedTensorDict])
    stack.__dict__.update({_SOURCE: source, "_batch_size": torch.Size(shape)})
    return stack


def non_tensors(values: Sequence[Any], shape: Shape) -> NonTensorData | NonTensorStack:
    """Return a stack of one Python object a row, in C order of `shape`. Do not modify `values` afterwards."""
    if 0 in shape:
        # An empty stack can be neither saved nor indexed; a NonTensorData with an empty batch can.
        return NonTensorData([], batch_size=shape)
    source = FlatObjects(values, shape)
    if not shape:
        return source.make()
    stack: NonTensorStack = object.__new__(_LAZY[NonTensorStack])
    stack.__dict__.update({_SOURCE: source, "_batch_size": torch.Size(shape)})
    return stack


def flat_source(stack: Any) -> FlatRows | FlatObjects | None:
    """Return what the rows of `stack` will be made from; None once they are made, and for anything else."""
    source: FlatRows | FlatObjects | None = stack.__dict__.get(_SOURCE) if type(stack) in _CLASSES else None
    return source


def nested(flat: Iterator[Any], shape: Shape) -> Any:
    """Return the items, which come in C order of `shape`, as lists within lists."""
    return [nested(flat, shape[1:]) for _ in range(shape[0])] if shape else next(flat)


def _lazy_class(ordinary: Any) -> Any:
    """Return the subclass of a class of stacks whose instances become ordinary ones when they make their rows."""

    class Lazy(ordinary):
        # Another thread may make the rows while one of these runs, so none of them asks `super()`.

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            # tensordict makes other stacks as type(self)(…).
            return ordinary(*args, **kwargs)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # tensordict gives a stack other rows like this, when it updates one.
            _make_rows(self, ordinary).__init__(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(_make_rows(self, ordinary), name)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _make_rows(self, ordinary).__reduce_ex__(protocol)

        def _has_names(self) -> bool:
            return _SOURCE not in self.__dict__ and ordinary._has_names(self)

        def keys(self, *args: Any, **kwargs: Any) -> Any:
            source = self.__dict__.get(_SOURCE)
            if isinstance(source, FlatRows) and not args and not kwargs:
                return source.fields.keys()
            return ordinary.keys(self, *args, **kwargs)

        def tolist(self, **options: Any) -> Any:
            source = flat_source(self)
            if isinstance(source, FlatObjects) and not options:
                return nested(iter(source.values), source.shape)
            return ordinary.tolist(self, **options)

    # The names that tensordict prints, and writes into memory-mapped files.
    Lazy.__name__, Lazy.__qualname__, Lazy.__module__ = ordinary.__name__, ordinary.__name__, ordinary.__module__
    # torch's pytrees know exact classes, not subclasses.
    if (node := pytree.SUPPORTED_NODES.get(ordinary)) is not None:
        flatten_with_keys = node.flatten_with_keys_fn
        pytree.register_pytree_node(Lazy, node.flatten_fn, node.unflatten_fn, flatten_with_keys_fn=flatten_with_keys)
    return Lazy


_LAZY = {kind: _lazy_class(kind) for kind in (LazyStackedTensorDict, NonTensorStack)}
_CLASSES = tuple(_LAZY.values())


def _make_rows(stack: Any, ordinary: Any) -> Any:
    """Turn a stack into an ordinary one, and return it. Leave an ordinary one as it is."""
    with _MAKING:
        if (source := flat_source(stack)) is not None:
            # What was set in the meantime stays.
            stack.__dict__.update({**source.make().__dict__, **stack.__dict__})
        stack.__dict__.pop(_SOURCE, None)
        stack.__class__ = ordinary
    return stack


def _stacked(rows: Sequence[Any], shape: Shape, stack: Any) -> Any:
    """Stack rows, which come in C order of `shape`, as lazy stacks within lazy stacks."""
    level = rows
    for width in reversed(shape):
        level = [stack(*level[at : at + width]) for at in range(0, len(level), width)]
    return level[0]


def _carriers(values: Sequence[Any]) -> Sequence[NonTensorData]:
    """Return one carrier for each value. Carriers are not shared, because tensordict writes to them in place."""
    first = next(iter(values))
    # Unbinding one carrier costs half as much as making them one by one, and less if the value stays the same.
    carriers: Sequence[NonTensorData] = NonTensorData(first, batch_size=(len(values),)).unbind(0)
    for carrier, value in zip(carriers, values, strict=True):
        if value is not first:
            carrier.data = value
    return carriers
