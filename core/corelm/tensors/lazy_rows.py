"""Stacks that make their rows on first access. Without this file every row is made at once: slower, the same results.

A row costs one tensor with its own storage for every field, and a TensorDict around them: 15 to 20 µs for tokens, masks
and log-probs. Much of what is done with a batch needs no rows. So `lazy_rows` and `lazy_objects` return a stack that
holds only the flat values its rows will be made from. The stack answers for its shape and its keys, and `flat_source`
gives the flat values to code that can read them. Any other access makes the rows, and turns the stack into an ordinary
one, its class included.

This leans on how tensordict and torch work inside, so it is tried out on first use: `_trial` has the list. Where a part
of that list does not hold, `lazy_rows` and `lazy_objects` make every row at once. To do without this file, call
`stack_rows` and `stack_objects` instead of them, and take `flat_source` to return None.
"""

from __future__ import annotations

import logging
import reprlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase
from torch.utils import _pytree as pytree

from corelm.errors import brief
from corelm.tensors.ragged import Ragged
from corelm.tensors.stacks import Field, Shape, nested, stack_objects, stack_rows

_log = logging.getLogger(__name__)

#: The entry of a stack's `__dict__` that holds what its rows will be made from.
_SOURCE = "_corelm_source"
#: What a stack answers without making its rows. All that tensordict asks of a stack that is put into a TensorDict.
_ANSWERED = frozenset({"__class__", "shape", "batch_size", "_has_names", "keys", "tolist"})
#: How many objects a stack shows that has not made its rows.
_SHOWN = 6
#: The classes of stacks that have not made their rows.
_LAZY: set[type] = set()
#: Two threads that access one stack at once get the same rows.
_MAKING = threading.RLock()


@dataclass(frozen=True, slots=True, eq=False)
class FlatObjects:
    """One Python object a row, in C order of `shape`."""

    values: Sequence[Any]
    shape: Shape

    def make(self) -> NonTensorData | NonTensorStack:
        return stack_objects(self.values, self.shape)

    def shown(self) -> str:
        """Return the first values, and how many there are."""
        count = len(self.values)
        first = ", ".join(reprlib.repr(self.values[row]) for row in range(min(count, _SHOWN)))
        return f"[{first}{', …' if count > _SHOWN else ''}], batch_size={torch.Size(self.shape)}"


@dataclass(frozen=True, slots=True, eq=False)
class FlatRows:
    """Fields with one row a sample, held flat, in C order of `shape`."""

    fields: Mapping[str, Field]
    shape: Shape

    def make(self) -> LazyStackedTensorDict:
        return stack_rows(self.fields, self.shape)

    def shown(self) -> str:
        """Return the names of the fields, and how many rows there are."""
        return f"fields: {', '.join(self.fields)}; batch_size={torch.Size(self.shape)}"

    def objects(self, name: str) -> Sequence[Any]:
        """Return the objects of a field that holds no tensors. None stands for rows without the field."""
        field = self.fields.get(name)
        return (None,) if field is None or isinstance(field, Ragged) else field


def lazy_rows(fields: Mapping[str, Field], shape: Shape) -> LazyStackedTensorDict:
    """Return a lazy stack of one TensorDict a row. `shape` has at least one row. Do not modify `fields` afterwards."""
    return _stack(LazyStackedTensorDict, FlatRows(fields, shape))


def lazy_objects(values: Sequence[Any], shape: Shape) -> NonTensorData | NonTensorStack:
    """Return a stack of one Python object a row. `shape` has at least one row. Do not modify `values` afterwards."""
    return _stack(NonTensorStack, FlatObjects(values, shape))


def flat_source(stack: Any) -> FlatRows | FlatObjects | None:
    """Return what the rows of `stack` will be made from, or None once they are made. Do not modify it."""
    if type(stack) not in _LAZY:
        return None
    source: FlatRows | FlatObjects | None = object.__getattribute__(stack, "__dict__").get(_SOURCE)
    return source


def _stack(ordinary: type[TensorDictBase], source: FlatRows | FlatObjects) -> Any:
    lazy = _lazy_class(ordinary) if source.shape else None  # type: ignore[arg-type]  # Any to mypy, hence not Hashable
    return source.make() if lazy is None else _unmade(lazy, source)


# How a stack waits ---------------------------------------------------------------------------------------------------


def _waiting(ordinary: type[TensorDictBase]) -> Any:
    """Return the subclass of a class of stacks whose instances have not made their rows yet."""

    class Lazy(ordinary):
        # Another thread may have made the rows by the time one of these runs. `self` is an ordinary stack then, and
        # `self.name` asks the ordinary class.

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            # tensordict makes other stacks as type(self)(…).
            return ordinary(*args, **kwargs)

        def __getattribute__(self, name: str) -> Any:
            if name in _ANSWERED:
                return object.__getattribute__(self, name)
            return getattr(_make_rows(self), name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(_make_rows(self), name, value)

        def __delattr__(self, name: str) -> None:
            delattr(_make_rows(self), name)

        @property
        def batch_size(self) -> torch.Size:
            source = flat_source(self)
            return self.batch_size if source is None else torch.Size(source.shape)

        @property
        def shape(self) -> torch.Size:
            source = flat_source(self)
            return self.batch_size if source is None else torch.Size(source.shape)

        def _has_names(self) -> bool:
            return flat_source(self) is None and self._has_names()

        def keys(self, *args: Any, **kwargs: Any) -> Any:
            source = flat_source(self)
            if isinstance(source, FlatRows) and not args and not kwargs:
                return source.fields.keys()
            return _make_rows(self).keys(*args, **kwargs)

        def tolist(self, **options: Any) -> Any:
            source = flat_source(self)
            if isinstance(source, FlatObjects) and not options:
                return nested(iter(source.values), source.shape)
            return _make_rows(self).tolist(**options)

        def __repr__(self) -> str:
            source = flat_source(self)
            return repr(self) if source is None else f"{ordinary.__name__}({source.shown()})"

    # The name that tensordict shows when it prints a TensorDict.
    Lazy.__name__ = Lazy.__qualname__ = ordinary.__name__
    _LAZY.add(Lazy)
    return Lazy


def _unmade(lazy: Any, source: FlatRows | FlatObjects) -> Any:
    stack = object.__new__(lazy)
    object.__setattr__(stack, _SOURCE, source)
    return stack


def _make_rows(stack: Any) -> Any:
    """Turn a lazy stack into an ordinary one, and return it. Leave an ordinary one as it is."""
    with _MAKING:
        source = flat_source(stack)
        if source is not None:
            made = source.make()
            state = object.__getattribute__(stack, "__dict__")
            state.update(made.__dict__)
            object.__setattr__(stack, "__class__", type(made))
            del state[_SOURCE]
    return stack


# Whether it can be done ----------------------------------------------------------------------------------------------


@cache
def _lazy_class(ordinary: type[TensorDictBase]) -> Any:
    """Return the lazy subclass of a class of stacks; None where tensordict or torch lacks what that needs."""
    try:
        lazy = _waiting(ordinary)
        _register(lazy, ordinary)
        with torch.device("cpu"):
            failed = _trial(lazy, ordinary)
    except Exception as error:  # of any kind: this is only about speed
        failed = brief(repr(error))
    if failed is None:
        return lazy
    _log.warning(
        "tensordict %s does not support lazy rows, so the rows of every container are made at once. "
        "Results are the same, and large batches are slower. What failed for %s: %s",
        tensordict.__version__,
        ordinary.__name__,
        failed,
    )
    return None


def _register(lazy: Any, ordinary: type[TensorDictBase]) -> None:
    """Make torch's pytrees go into a lazy stack as into an ordinary one. They know exact classes, not subclasses."""
    node = pytree.SUPPORTED_NODES.get(ordinary)
    if node is None:
        return
    flatten, with_keys = node.flatten_fn, node.flatten_with_keys_fn
    pytree.register_pytree_node(
        lazy,
        lambda stack: flatten(_make_rows(stack)),
        node.unflatten_fn,
        flatten_with_keys_fn=None if with_keys is None else lambda stack: with_keys(_make_rows(stack)),
    )


class _Plain:
    pass


def _trial(lazy: Any, ordinary: type[TensorDictBase]) -> str | None:
    """Try out what lazy rows need from tensordict and torch, in order. Return the first thing that fails."""
    shape = (2, 1)
    objects = ("a", "b")
    source: FlatRows | FlatObjects = FlatObjects(objects, shape)
    answers = "tolist"
    if ordinary is LazyStackedTensorDict:
        source = FlatRows({"tensor": Ragged.from_list([[1], [2, 3]]), "object": objects}, shape)
        answers = "keys"
    made, waiting, other = source.make(), _unmade(lazy, source), _unmade(lazy, source)
    needed = {
        "the class of what is made": lambda: type(made) is ordinary,
        "a stack keeps its state in its __dict__": lambda: ordinary.__basicsize__ == _Plain.__basicsize__,
        "nothing refers to a new stack": lambda: weakref.getweakrefcount(made) == 0,
        "batch_size": lambda: waiting.batch_size == made.batch_size and waiting.shape == made.shape,
        "_has_names": lambda: waiting._has_names() is made._has_names() is False,
        answers: lambda: sorted(getattr(waiting, answers)()) == sorted(getattr(made, answers)()),
        "these answers make no rows": lambda: flat_source(waiting) is source,
        "pytrees": lambda: len(pytree.tree_leaves([other])) == len(pytree.tree_leaves([made])),
        "an index makes the rows": lambda: waiting[1].batch_size == made[1].batch_size and flat_source(waiting) is None,
        "the class can be changed": lambda: type(waiting) is ordinary,
        "the state of what is made": lambda: waiting.__dict__.keys() == made.__dict__.keys(),
        "the rows": lambda: str(waiting.tolist()) == str(made.tolist()),
    }
    return next((what for what, holds in needed.items() if not holds()), None)
