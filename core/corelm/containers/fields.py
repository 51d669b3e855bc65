"""The fields of containers: which there are, and how they are read, set and selected in either layout.

Rows are stored in one of two layouts. Dense: one tensor per field, with pads. Not padded: a lazy stack of rows, each
with its own length. The layout is never guessed from lengths: dense rows have an entry `padded`, stored once for all of
them, that follows them through every operation; other rows have no such entry. So a stack of both layouts is detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
)
from torch import Tensor

from corelm.errors import InvalidRequestError, refuse
from corelm.tensors.lazy_rows import FlatRows, Shape, flat_source
from corelm.tensors.ragged import Ragged
from corelm.validate import as_list, read_once

C = TypeVar("C", bound=type)
Reader = Callable[[Any, str], Any]

#: Ids of all tokens of a row, one after another: a row of this field is not as long as its tokens. Pads are negative.
SETS = "kept_ids"
#: How many of these ids belong to each token.
COUNTS = "kept_counts"
#: A row of k values for each token.
WIDE = frozenset({"top_ids", "top_log_probs"})
#: The fields that say over which ids the log-probs were normalised, and those about the most probable ids.
KEPT, TOP = (SETS, COUNTS, "kept_log_mass"), ("top_ids", "top_log_probs", "tail_log_mass")
#: What stands in the pads of fields that hold ids, and where nothing was scored. It is 0 in the others.
NO_ID = dict.fromkeys((SETS, "top_ids"), -1)
#: Fields that say how to read the others. Selecting any field of a container keeps them.
EXPLAINING = frozenset({"padded", "scored_mask", "provenance", SETS, COUNTS})


class _Field:
    """A field of a container, read with a function. tensordict handles the setting of fields.

    A descriptor and not a case of `__getattr__`, because tensordict 0.15 gives every field a descriptor of
    its own, and Python asks those first.
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

    def decorate(cls: Any) -> Any:
        by_name = {name: readers.get(name, default) for name in cls.__dataclass_fields__}
        # tensordict writes its own versions into every TensorClass once the class body is done, so these come after.
        make, get_item, set_field, select_fields = cls.__init__, cls.__getitem__, cls.set, cls._select

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

        def __getitem__(self: Any, index: Any) -> Any:
            try:
                out = get_item(self, index)
                if 0 not in out.batch_size or 0 in self.batch_size:
                    return out
            except RuntimeError as error:  # a lazy stack cannot be indexed with an empty tensor
                out = error
            shape = TensorDict({}, batch_size=self.batch_size)[index].batch_size
            if isinstance(out, Exception) and 0 not in shape:
                raise out
            # An empty lazy stack has no keys; a tensor without rows keeps them.
            return cls.from_tensordict(_without_rows(self._tensordict, shape))

        def set_rows(self: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if by_name.get(key) is tensors and isinstance(value, (list, tuple, Ragged)):
                return _set_rows(self, key, value)
            value = _listed(value) if by_name.get(key) is strings else value
            return set_field(self, key, value, *args, **kwargs)

        def select(self: Any, *keys: Any, **options: Any) -> Any:
            return select_fields(self, *keys, *(EXPLAINING & set(self.keys())), **options)

        cls.__init__, cls.__getitem__, cls.set = __init__, __getitem__, set_rows
        # A TensorDict that selects ("tokens", "full") calls `_select` of its Tokens.
        cls.select = cls._select = select
        for name, reader in by_name.items():
            setattr(cls, name, _Field(name, reader))
        return cls

    return decorate


def short(container: Any) -> str:
    """Return the ``repr`` of a container: its rows and the names of its fields. Makes no rows."""
    count = math.prod(container.batch_size)
    rows = f"{count:,} row{'' if count == 1 else 's'}"
    rows += f" as {tuple(container.batch_size)}" if len(container.batch_size) > 1 else ""
    names = [name for name in container.keys() if name not in ("padded", "provenance")]
    return f"{type(container).__name__}({rows}: {', '.join(names)})"


# Readers -------------------------------------------------------------------------------------------------------------


def as_stored(container: Any, name: str) -> Any:
    """Return what tensordict holds for a field. None if the field is absent."""
    td = container._tensordict
    return td.get(name) if name in td.keys() else None


def is_padded(container: Any, name: str = "padded") -> bool:
    """Return whether the rows are dense. Without rows, as they were stored.

    Raises:
        InvalidRequestError: some rows are dense and others are not.
    """
    kinds, parts = set[bool](), [container._tensordict]
    while parts:
        td = parts.pop()
        if not isinstance(td, LazyStackedTensorDict):
            mark = td.get(name, None)
            if isinstance(mark, NonTensorStack):
                kinds |= {one is True for one in flat(mark.tolist())}
            else:
                kinds.add(mark is not None and mark.data is True)
        elif flat_source(td) is None:
            parts += td.tensordicts
        else:
            kinds.add(False)
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


# Rows and what they hold ---------------------------------------------------------------------------------------------


def rows(td: TensorDictBase) -> list[TensorDictBase]:
    """Return the rows of `td`, each with batch shape (), in C order."""
    found = [td]
    for _ in range(td.batch_dims):
        parts, found = found, []
        for part in parts:
            found += part.unbind(0)
    return found


def flat(value: Any) -> list[Any]:
    """Return the leaves of nested lists, in order."""
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, (list, tuple)) else [value]


def unnested(
    given: Any, is_leaf: Callable[[Any], bool], expected: str, what: str, field: str, top: bool = True
) -> tuple[list[Any], Shape]:
    """Return the leaves of nested sequences in C order, and the batch shape. Errors call them `what`.

    An empty sequence is a batch without leaves at the top, and an empty leaf below it.
    """
    if is_leaf(given):
        return [given], ()
    items = as_list(given)
    if not isinstance(items, list):
        kind = f"{type(given).__name__}{read_once(given)}"
        if isinstance(given, Tensor):
            kind = f"a tensor of shape {list(given.shape)}, which may hold pads"
        raise InvalidRequestError(f"{what}: expected {expected}; got {kind}", field=field)
    if not (items or top):
        return [items], ()
    parts = [unnested(item, is_leaf, expected, what, field, top=False) for item in items]
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        found = ", ".join(map(str, sorted(shapes)))
        raise InvalidRequestError(
            f"{what}: all lists on one level must have the same shape, but these have batch shapes {found}", field=field
        )
    return [leaf for leaves, _ in parts for leaf in leaves], (len(items), *(shapes.pop() if shapes else ()))


def row_objects(td: TensorDictBase, name: str) -> list[Any]:
    """Return the value of a non-tensor entry for each row, in C order; None for rows without it."""
    source = flat_source(td)
    if isinstance(source, FlatRows):
        values = source.fields.get(name)
        return [None] * td.batch_size.numel() if values is None or isinstance(values, Ragged) else list(values)
    if isinstance(td, LazyStackedTensorDict):
        return [value for part in td.unbind(0) for value in row_objects(part, name)]
    value = td.get(name, None)
    return [None] * td.batch_size.numel() if value is None else objects(value, td.batch_dims)


def objects(value: Any, dims: int) -> list[Any]:
    """Return the Python objects of a non-tensor entry, one a row of a batch with `dims` dimensions, in C order."""
    if isinstance(value, NonTensorData):
        return [value.data] * math.prod(value.batch_size[:dims])
    found = [value.tolist()]
    for _ in range(dims):
        found = [leaf for part in found for leaf in part]
    return found


def must_be_of_one_width(row_values: Sequence[Tensor], key: NestedKey) -> None:
    """Refuse rows that have different numbers of values a token."""
    for row, values in enumerate(row_values):
        if values.shape[1:] != row_values[0].shape[1:]:
            here, first = ([*one.shape[1:]] for one in (values, row_values[0]))
            what = f"has {here} values a token, and row 0 has {first}"
            raise InvalidRequestError(
                f"{key}: row {row} {what}; read them apart, or give all rows the same top_logprobs or top_k",
                field=str(key),
                problems={row: what},
            )


def must_have_lengths(found: Tensor, wanted: Tensor, name: str, of: str = "tokens") -> None:
    """Refuse rows of a field that do not have the lengths of the tokens, or of what `of` names. int64[rows] each."""
    if torch.equal(found, wanted):
        return
    if len(found) != len(wanted):
        raise InvalidRequestError(f"{name}: has {len(found)} rows, but the tokens have {len(wanted)}", field=name)
    differ = (found != wanted).nonzero().flatten().tolist()
    refuse({row: f"{int(found[row])} values for {int(wanted[row])} {of}" for row in differ}, name)


def _without_rows(td: TensorDictBase, batch_size: torch.Size) -> TensorDict:
    """Return a TensorDict without rows, with the keys and dtypes of `td`. `batch_size` must contain a 0."""
    block = _first_block(td)
    return TensorDict({name: _no_rows(block.get(name), block.batch_dims, batch_size) for name in td.keys()}, batch_size)


def _no_rows(value: Any, batch_dims: int, batch_size: torch.Size) -> Any:
    if isinstance(value, Tensor):
        return value.new_empty((*batch_size, *value.shape[batch_dims:]))
    if is_non_tensor(value):
        # tensordict cannot save an empty stack of values, but it can save a NonTensorData with an empty batch. A bool
        # (`padded`) says how rows are stored and is kept. Other values belong to rows and are dropped.
        datum = _first_block(value).data
        return NonTensorData(datum if isinstance(datum, bool) else [], batch_size=batch_size)
    return type(value).from_tensordict(_without_rows(value._tensordict, batch_size))


def _first_block(td: Any) -> Any:
    """Return the first of the plain TensorDicts that a lazy stack consists of."""
    return _first_block(td.tensordicts[0]) if isinstance(td, LazyStackedTensorDict) else td


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
