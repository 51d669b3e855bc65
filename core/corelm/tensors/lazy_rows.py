"""Lazy stacks whose rows are made when somebody asks for one: `lazy_rows` and `lazy_objects`.

A row costs a tensor with a storage of its own for every field, and a TensorDict around them: 15 to 20 µs where tokens,
masks and log-probs are wanted. Much that is done with a batch needs no row. So a stack starts as the flat values it is
made from, which answer for its shape and its keys, and which `flat_source` gives to those who can read them. Asked for
anything else, it makes its rows and is an ordinary stack from then on, class and all.

Only speed rests on how tensordict works inside: what it asks for that is not answered here makes the rows.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from corelm.tensors.ragged import Ragged

T = TypeVar("T")
Shape = tuple[int, ...]

#: What a stack is made from stands here in its `__dict__`, until it has been made.
_SOURCE = "_made_from"
#: Two threads that touch one stack get the same rows.
_MAKING = threading.RLock()


@dataclass(frozen=True, slots=True, eq=False)
class FlatObjects:
    """One Python object a row, in C order of `shape`."""

    values: Sequence[Any]
    shape: Shape

    def make(self) -> NonTensorStack:
        return stacked(_items(self.values), self.shape, NonTensorStack)


@dataclass(frozen=True, slots=True, eq=False)
class FlatRows:
    """Fields of one row a sample, flat: tensors as `Ragged`, Python objects as one a row; in C order of `shape`."""

    fields: Mapping[str, Ragged | Sequence[Any]]
    shape: Shape

    def make(self) -> LazyStackedTensorDict:
        """Every row of every field has a storage of its own, and gradients reach it whatever mode this is called in."""
        with torch.inference_mode(False), torch.enable_grad():
            columns = [_copies(field) if isinstance(field, Ragged) else _items(field) for field in self.fields.values()]
        rows = [
            TensorDict(dict(zip(self.fields, row, strict=True)), batch_size=()) for row in zip(*columns, strict=True)
        ]
        return stacked(rows, self.shape, LazyStackedTensorDict)

    def objects(self, name: str) -> Sequence[Any]:
        """What a field holds that is not a tensor; None stands for rows without it."""
        field = self.fields.get(name)
        return (None,) if field is None or isinstance(field, Ragged) else field


def lazy_rows(fields: Mapping[str, Ragged | Sequence[Any]], shape: Shape) -> LazyStackedTensorDict:
    """A lazy stack of one TensorDict a row. `shape` has at least one row; nobody writes to `fields` again."""
    return _deferred(_DeferredRows, FlatRows(fields, shape)) if shape else FlatRows(fields, shape).make()


def lazy_objects(values: Sequence[Any], shape: Shape) -> NonTensorData | NonTensorStack:
    """One Python object a row, where `shape` has at least one."""
    return _deferred(_DeferredObjects, FlatObjects(values, shape)) if shape else FlatObjects(values, shape).make()


def flat_source(stack: Any) -> FlatRows | FlatObjects | None:
    """What a stack will be made from, as long as its rows are not made. It is only to be read."""
    return stack.__dict__.get(_SOURCE) if type(stack) in (_DeferredRows, _DeferredObjects) else None


def stacked(rows: Sequence[T], shape: Shape, stack: Callable[..., Any]) -> Any:
    """FlatRows in C order, as lazy stacks within lazy stacks."""
    level: Sequence[Any] = rows
    for width in reversed(shape):
        level = [stack(*level[at : at + width]) for at in range(0, len(level), width)]
    return level[0]


def nested(flat: Iterator[Any], shape: Shape) -> Any:
    """Items in C order, as lists within lists."""
    return [nested(flat, shape[1:]) for _ in range(shape[0])] if shape else next(flat)


# How a stack waits ---------------------------------------------------------------------------------------------------


def _deferring(ordinary: type[TensorDictBase], *answers: str) -> Any:
    """The subclass of a kind of stack whose rows are not made yet. It answers by itself what is named in `answers`."""
    answered = frozenset({"__class__", "__dict__", "shape", "batch_size", "_has_names", *answers})

    class Deferred(ordinary):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            # tensordict makes other stacks as type(self)(…).
            return ordinary(*args, **kwargs)

        def __getattribute__(self, name: str) -> Any:
            if name not in answered:
                _make(self, ordinary)
            return object.__getattribute__(self, name)

        @property
        def batch_size(self) -> torch.Size:
            source = flat_source(self)
            return ordinary.batch_size.fget(self) if source is None else torch.Size(source.shape)

        @batch_size.setter
        def batch_size(self, value: Any) -> None:
            _make(self, ordinary)
            self.batch_size = value

        @property
        def shape(self) -> torch.Size:
            return self.batch_size

        def _has_names(self) -> bool:
            return False

        def keys(self, *args: Any, **kwargs: Any) -> Any:
            source = flat_source(self)
            if args or kwargs or not isinstance(source, FlatRows):
                _make(self, ordinary)
                return ordinary.keys(self, *args, **kwargs)
            return source.fields.keys()

        def tolist(self, **options: Any) -> Any:
            source = flat_source(self)
            if options or not isinstance(source, FlatObjects):
                _make(self, ordinary)
                return ordinary.tolist(self, **options)
            return nested(iter(source.values), source.shape)

    Deferred.__name__ = Deferred.__qualname__ = f"Deferred{ordinary.__name__}"
    return Deferred


_DeferredRows = _deferring(LazyStackedTensorDict, "keys")
_DeferredObjects = _deferring(NonTensorStack, "tolist")


def _deferred(cls: Any, source: FlatRows | FlatObjects) -> Any:
    stack = object.__new__(cls)
    stack.__dict__[_SOURCE] = source
    return stack


def _make(stack: Any, ordinary: type[TensorDictBase]) -> None:
    with _MAKING:
        source = flat_source(stack)
        if source is not None:
            with _no_collection():
                stack.__dict__.update(source.make().__dict__)
            stack.__class__ = ordinary
            del stack.__dict__[_SOURCE]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of objects that all stay make the garbage collector go through everything, again and again: twice the
    time, and it finds nothing.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _copies(rows: Ragged) -> Sequence[Tensor]:
    # Not views: a row kept in a replay buffer or sent elsewhere must not take its whole batch along.
    return torch.split_with_sizes_copy(rows.values, rows.lengths.tolist())  # type: ignore[func-returns-value,return-value]


def _items(values: Sequence[Any]) -> Sequence[NonTensorData]:
    """A carrier for each, of its own, since tensordict writes to them in place."""
    first = next(iter(values))
    # Taken from one carrier for all they cost half of what they do one by one, and less still if nothing is changed.
    items: Sequence[NonTensorData] = NonTensorData(first, batch_size=(len(values),)).unbind(0)
    for item, value in zip(items, values, strict=True):
        if value is not first:
            item.data = value
    return items
