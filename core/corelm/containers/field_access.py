"""How the fields of a container read: as what a person expects, whichever way the rows are stored.

Rows are stored in one of two ways. Dense: one tensor a field, with pads. One row a sample: a lazy stack of rows, each
as long as it is. Which of the two is never guessed from lengths: dense rows say so, in an entry `padded` that goes
where they go, once for all of them; rows of their own length have none. So a stack of both kinds is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from corelm.errors import InvalidRequestError
from corelm.tensors.lazy_rows import FlatRows, flat_source
from corelm.tensors.ragged import Ragged

C = TypeVar("C", bound=type)
Reader = Callable[[Any, str], Any]

#: Fields without which the others are read wrongly: how rows are stored, what is scored, of which distribution.
EXPLAINING = frozenset({"padded", "scored_mask", "provenance"})


class _Field:
    """A field of a container, read with a function. tensordict handles the setting of fields.

    A descriptor and not a case of `__getattr__`, because tensordict 0.15 gives every field a descriptor of its own, and
    Python asks those first.
    """

    def __init__(self, name: str, reader: Reader) -> None:
        self._name, self._reader = name, reader

    def __get__(self, container: Any, owner: type | None = None) -> Any:
        if container is None:
            raise AttributeError(f"{self._name!r} is a field of the instances of {owner}")
        return self._reader(container, self._name)


def field_readers(default: Reader, **readers: Reader) -> Callable[[C], C]:
    """Class decorator for a TensorClass: read its fields with these functions ``(container, name) -> value``.

    `default` serves the fields that have no reader in `readers`. The decorated class also keeps its keys when an index
    selects nothing, and takes back what it gave: a list of tensors, one a row.
    """

    def decorate(cls: C) -> C:
        fields = tuple(cls.__dataclass_fields__)  # type: ignore[attr-defined]
        by_name = {name: readers.get(name, default) for name in fields}
        # tensordict writes its own versions into every TensorClass once the class body is done, so these come after.
        make = cls.__init__  # type: ignore[misc]
        get_attribute, get_item = cls.__getattr__, cls.__getitem__  # type: ignore[attr-defined,index]
        set_field, select_fields = cls.set, cls._select  # type: ignore[attr-defined]

        def __getattr__(self: Any, name: str) -> Any:
            try:
                return get_attribute(self, name)
            except AttributeError as error:
                raise AttributeError(f"{cls.__name__} has no {name!r}; its fields are {', '.join(fields)}") from error

        def __getitem__(self: Any, index: Any) -> Any:
            try:
                out = get_item(self, index)
            except RuntimeError:
                # A lazy stack cannot be indexed by an empty tensor.
                batch_size = TensorDict({}, batch_size=self.batch_size)[index].batch_size
                if 0 not in batch_size:
                    raise
            else:
                batch_size = out.batch_size
            if 0 not in batch_size or 0 in self.batch_size:
                return out
            # A lazy stack of nothing has no keys; a tensor of no rows has.
            return cls.from_tensordict(emptied(self._tensordict, batch_size))  # type: ignore[attr-defined]

        def __init__(self: Any, *args: Any, **fields: Any) -> None:
            for name, value in fields.items():
                if by_name.get(name) is tensors and isinstance(value, (list, tuple, Ragged)):
                    # tensordict would drop it without a word.
                    raise InvalidRequestError(
                        f"{cls.__name__}.{name}: rows of their own length are not given to the constructor; make one "
                        f"{cls.__name__} a row and stack them with tensordict.lazy_stack",
                        field=name,
                    )
            make(self, *args, **fields)

        def select(self: Any, *keys: Any, **options: Any) -> Any:
            # What says how to read the others goes where they go.
            return select_fields(self, *keys, *(EXPLAINING & set(self.keys())), **options)

        def set_rows(self: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if by_name.get(key) is tensors and isinstance(value, (list, tuple, Ragged)):
                return _set_rows(self, key, value)
            return set_field(self, key, value, *args, **kwargs)

        methods = {"__init__": __init__, "__getattr__": __getattr__, "__getitem__": __getitem__, "set": set_rows}
        # A TensorDict that selects ("tokens", "full") asks its Tokens to `_select`.
        for name, method in (methods | {"select": select, "_select": select}).items():
            setattr(cls, name, method)
        for name, reader in by_name.items():
            setattr(cls, name, _Field(name, reader))
        return cls

    return decorate


# Readers -------------------------------------------------------------------------------------------------------------


def as_stored(container: Any, name: str) -> Any:
    """Return what tensordict holds for a field. None if the field is absent."""
    td = container._tensordict
    return td.get(name) if name in td.keys() else None


def is_padded(container: Any, name: str = "padded") -> bool:
    """Whether the rows are dense.

    Raises:
        InvalidRequestError: some rows are dense and others are not.
    """
    kinds = {mark is True for mark in data_of(container._tensordict, name)}
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"{type(container).__name__}: some rows are padded and others are not, so they cannot be read as one; "
            "read each kind on its own, or all of them with corelm.ragged(td, key)",
            field=name,
        )
    return True in kinds


def tensors(container: Any, name: str) -> Any:
    """Dense: the tensor. Else a tensor a row, in lists nested like the batch. None if the field is absent.

    Raises:
        InvalidRequestError: dense rows of different widths, or rows of both kinds.
    """
    td = container._tensordict
    if name not in td.keys():
        return None
    if not is_padded(container):
        return _nested(td, name)
    try:
        return td.get(name)
    except RuntimeError as error:
        raise InvalidRequestError(
            f"{type(container).__name__}.{name}: the rows are padded to different widths and make no one tensor; "
            "read them row by row, or with corelm.ragged(td, key)",
            field=name,
        ) from error


def strings(container: Any, name: str) -> Any:
    """A str a row, in plain lists nested like the batch. None if the field is absent."""
    value = container._tensordict.get(name)
    return value.tolist() if is_non_tensor(value) else value


# What they are made of -----------------------------------------------------------------------------------------------


def blocks(td: Any) -> Iterator[Any]:
    """The plain TensorDicts that lazy stacks are made of, in order."""
    if isinstance(td, LazyStackedTensorDict):
        for part in td.tensordicts:
            yield from blocks(part)
    else:
        yield td


def rows(td: TensorDictBase) -> list[TensorDictBase]:
    """The rows of `td`, each of batch shape (), in C order."""
    return [td] if not td.batch_dims else [row for part in td.unbind(0) for row in rows(part)]


def flat(value: Any) -> list[Any]:
    """The leaves of lists within lists."""
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, (list, tuple)) else [value]


def data_of(td: TensorDictBase, name: str) -> Iterator[Any]:
    """What a non-tensor entry holds, once a row or once for many; None stands for rows without it."""
    source = flat_source(td)
    if isinstance(source, FlatRows):
        yield from source.objects(name)
        return
    for block in blocks(td):
        for leaf in blocks(block.get(name)):
            yield None if leaf is None else leaf.data


def emptied(td: TensorDictBase, batch_size: torch.Size) -> TensorDict:
    """No rows, of a batch shape that says so, with the keys and dtypes of `td`."""
    block = next(blocks(td))
    return TensorDict({name: _no_rows(block.get(name), block.batch_dims, batch_size) for name in td.keys()}, batch_size)


def _no_rows(value: Any, batch_dims: int, batch_size: torch.Size) -> Any:
    if isinstance(value, Tensor):
        return value.new_empty((*batch_size, *value.shape[batch_dims:]))
    if is_non_tensor(value):
        # A stack of no values is a thing tensordict makes, but cannot save; one carrier for no rows it can. A flag says
        # how rows are stored and stays; everything else is a row's own.
        datum = next(blocks(value)).data
        return NonTensorData(datum if isinstance(datum, bool) else [], batch_size=batch_size)
    return type(value).from_tensordict(emptied(value._tensordict, batch_size))


def _nested(td: TensorDictBase, name: str) -> Any:
    return [_nested(part, name) for part in td.unbind(0)] if td.batch_dims else td.get(name)


def _set_rows(container: Any, name: str, value: Any) -> Any:
    given = [row.clone() for row in value.split()] if isinstance(value, Ragged) else flat(value)
    wanted = [] if is_padded(container) else rows(container._tensordict)
    if len(given) != len(wanted):
        expected = f"{len(wanted)}, one a row" if wanted else "one dense tensor, as the container is padded"
        raise InvalidRequestError(
            f"{type(container).__name__}.{name}: expected {expected}; got a list of {len(given)}", field=name
        )
    for row, tensor in zip(wanted, given, strict=True):
        row.set(name, tensor)
    return container
