"""Read the fields of a container in either layout.

Rows are stored in one of two layouts. Dense: one tensor per field, with pads. Not padded: a lazy stack of rows, each
with its own length. The layout is never guessed from lengths: dense rows have an entry `padded`, stored once for all of
them, that follows them through every operation; other rows have no such entry. So a stack of both layouts is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from corelm.containers.field_shapes import COUNTS, SETS
from corelm.errors import InvalidRequestError
from corelm.tensors.lazy_rows import FlatRows, flat_source
from corelm.tensors.ragged import Ragged
from corelm.validate import as_list

C = TypeVar("C", bound=type)
Reader = Callable[[Any, str], Any]

#: Fields that say how to read the others. Selecting any field of a container keeps them.
EXPLAINING = frozenset({"padded", "scored_mask", "provenance", SETS, COUNTS})


class _Field:
    """A field of a container, read with a function. tensordict handles the setting of fields.

    A descriptor and not a case of `__getattr__`, because tensordict 0.15 gives every field a descriptor of its own, and
    Python asks those first.
    """

    def __init__(self, name: str, reader: Reader) -> None:
        self._name, self._reader = name, reader

    def __get__(self, container: Any, owner: type | None = None) -> Any:
        if container is None:
            raise AttributeError(f"{self._name!r} is a field of instances of {owner}, not of the class")
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
                # A lazy stack cannot be indexed with an empty tensor.
                batch_size = TensorDict({}, batch_size=self.batch_size)[index].batch_size
                if 0 not in batch_size:
                    raise
            else:
                batch_size = out.batch_size
            if 0 not in batch_size or 0 in self.batch_size:
                return out
            # An empty lazy stack has no keys; a tensor without rows keeps them.
            return cls.from_tensordict(without_rows(self._tensordict, batch_size))  # type: ignore[attr-defined]

        def __init__(self: Any, *args: Any, **fields: Any) -> None:
            for name, value in fields.items():
                if by_name.get(name) is tensors and isinstance(value, (list, tuple, Ragged)):
                    # tensordict would drop it silently.
                    raise InvalidRequestError(
                        f"{cls.__name__}.{name}: the constructor takes dense tensors and no lists of rows; type "
                        f"{cls.__name__}.from_rows({name}=…)",
                        field=name,
                    )
                if by_name.get(name) is strings:
                    fields[name] = _listed(value)
            make(self, *args, **fields)

        def select(self: Any, *keys: Any, **options: Any) -> Any:
            return select_fields(self, *keys, *(EXPLAINING & set(self.keys())), **options)

        def set_rows(self: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if by_name.get(key) is tensors and isinstance(value, (list, tuple, Ragged)):
                return _set_rows(self, key, value)
            if by_name.get(key) is strings:
                value = _listed(value)
            return set_field(self, key, value, *args, **kwargs)

        methods = {"__init__": __init__, "__getattr__": __getattr__, "__getitem__": __getitem__, "set": set_rows}
        # A TensorDict that selects ("tokens", "full") calls `_select` of its Tokens.
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
    """Return whether the rows are dense.

    Raises:
        InvalidRequestError: some rows are dense and others are not.
    """
    kinds = {mark is True for mark in data_of(container._tensordict, name)}
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"{type(container).__name__}: some rows are padded and others are not, so they cannot be read together; "
            "lay them out alike with corelm.repad(td), or read all of them with corelm.ragged(td, key)",
            field=name,
        )
    return True in kinds


def tensors(container: Any, name: str) -> Any:
    """Return the tensor of dense rows, else one tensor per row in lists nested like the batch.

    None if the field is absent.

    Raises:
        InvalidRequestError: dense rows have different widths, or only some rows are dense.
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
            f"{type(container).__name__}.{name}: the rows are padded to different widths and do not form one tensor; "
            "pad them to one width with corelm.repad(td), or read all of them with corelm.ragged(td, key)",
            field=name,
        ) from error


def strings(container: Any, name: str) -> Any:
    """Return one str per row, in lists nested like the batch. None if the field is absent."""
    value = container._tensordict.get(name)
    listed = _listed(value.data) if isinstance(value, NonTensorData) else None
    if listed and isinstance(listed, list):
        # tensordict holds every sequence but a list as one object, and would return all of it for each row.
        return listed
    return value.tolist() if is_non_tensor(value) else value


# Rows and storage ----------------------------------------------------------------------------------------------------


def blocks(td: Any) -> Iterator[Any]:
    """Yield the plain TensorDicts that a lazy stack consists of, in order."""
    if isinstance(td, LazyStackedTensorDict):
        for part in td.tensordicts:
            yield from blocks(part)
    else:
        yield td


def rows(td: TensorDictBase) -> list[TensorDictBase]:
    """Return the rows of `td`, each with batch shape (), in C order."""
    return [td] if not td.batch_dims else [row for part in td.unbind(0) for row in rows(part)]


def flat(value: Any) -> list[Any]:
    """Return the leaves of nested lists, in order."""
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, (list, tuple)) else [value]


def data_of(td: TensorDictBase, name: str) -> Iterator[Any]:
    """Yield the values of a non-tensor entry, one per row or one for several rows; None for rows without it."""
    source = flat_source(td)
    if isinstance(source, FlatRows):
        yield from source.objects(name)
        return
    for block in blocks(td):
        for leaf in blocks(block.get(name)):
            yield None if leaf is None else leaf.data


def without_rows(td: TensorDictBase, batch_size: torch.Size) -> TensorDict:
    """Return a TensorDict without rows, with the keys and dtypes of `td`. `batch_size` must contain a 0."""
    block = next(blocks(td))
    return TensorDict({name: _no_rows(block.get(name), block.batch_dims, batch_size) for name in td.keys()}, batch_size)


def _no_rows(value: Any, batch_dims: int, batch_size: torch.Size) -> Any:
    if isinstance(value, Tensor):
        return value.new_empty((*batch_size, *value.shape[batch_dims:]))
    if is_non_tensor(value):
        # tensordict cannot save an empty stack of values, but it can save a NonTensorData with an empty batch. A bool
        # (`padded`) says how rows are stored and is kept. Other values belong to rows and are dropped.
        datum = next(blocks(value)).data
        return NonTensorData(datum if isinstance(datum, bool) else [], batch_size=batch_size)
    return type(value).from_tensordict(without_rows(value._tensordict, batch_size))


def _listed(value: Any) -> Any:
    """Return nested sequences, such as tuples and arrays, as nested lists; anything else unchanged."""
    value = value if isinstance(value, TensorDictBase) else as_list(value)
    return [_listed(item) for item in value] if isinstance(value, list) else value


def _nested(td: TensorDictBase, name: str) -> Any:
    return [_nested(part, name) for part in td.unbind(0)] if td.batch_dims else td.get(name)


def _set_rows(container: Any, name: str, value: Any) -> Any:
    values = [row.clone() for row in value.split()] if isinstance(value, Ragged) else flat(value)
    targets = [] if is_padded(container) else rows(container._tensordict)
    if len(values) != len(targets):
        expected = f"{len(targets)} tensors, one per row" if targets else "one dense tensor, as the container is padded"
        raise InvalidRequestError(
            f"{type(container).__name__}.{name}: expected {expected}; got a list of {len(values)}", field=name
        )
    for target, row in zip(targets, values, strict=True):
        target.set(name, row)
    return container
