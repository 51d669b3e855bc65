"""The containers that every engine fills in the same way (`Text`, `Tokens`, `Masks`, `LogProbs`; `ChatHistory` is in
`history.py`), and `PerToken` for values computed from them.

Each is a TensorClass: it slices, stacks, saves and moves with the TensorDict that holds it. With batch ``(B,)``, fields
read as::

    td["tokens"].response         # dense: int64[B, width]; otherwise a list of B tensors
    td["text"].response           # a list of B strings
    td["log_probs"].provenance    # one Provenance, or a tuple of them if rows differ

With batch ``()`` a field is one tensor or one string, with ``(B, n)`` a list of lists. A field that is absent
reads as None and is not among the keys. A field can be set to any value of the kind that it returns.
`from_rows` makes a container of rows of their own length; one made with the constructor is dense, unless you
pass ``padded=False``. Call `ragged` for flat values in either layout.

The layout is never guessed from lengths: dense rows have an entry `padded`, stored once for all of them, that
follows them through every operation; other rows, a lazy stack, have no such entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
)
from torch import Tensor

from corelm.errors import InvalidRequestError, refuse
from corelm.spec.provenance import Provenance
from corelm.tensors.lazy_rows import FlatObjects, FlatRows, Shape, flat_source, lazy_rows
from corelm.tensors.ragged import Ragged, as_tensor, unreadable
from corelm.tensors.token_sets import TokenSets
from corelm.validate import as_list, did_you_mean, invalid, read_once, shown

C = TypeVar("C", bound=TensorClass)
Strings = Any  # str, list[str], list[list[str]] …: nested like the batch
Tensors = Any  # Tensor, or list[Tensor], list[list[Tensor]] …: nested like the batch
K = TypeVar("K", bound=type)
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


def _field(reader: Reader, name: str) -> property:
    # tensordict handles the setting of fields. It gives each a descriptor, which this replaces.
    return property(lambda container: reader(container, name))


def field_readers(default: Reader, **readers: Reader) -> Callable[[K], K]:
    """Class decorator for a TensorClass: read its fields with these functions ``(container, name) -> value``.

    `default` serves the fields that have no reader in `readers`. The decorated class also keeps its keys when an index
    selects nothing, and takes back what it gave: a list of tensors, one a row.
    """

    def decorate(cls: Any) -> Any:
        by_name: dict[str, Any] = {name: readers.get(name, default) for name in cls.__dataclass_fields__}
        # tensordict writes its own versions into every TensorClass once the class body is done, so these come after.
        make, get_item, set_field, select_fields = cls.__init__, cls.__getitem__, cls.set, cls._select
        get_other = cls.__getattr__

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

        def __getattr__(self: Any, name: str) -> Any:
            try:
                return get_other(self, name)
            except AttributeError:
                hint = "" if name.startswith("_") else did_you_mean(name, by_name)
                raise AttributeError(f"{cls.__name__} has no attribute {name!r}{hint}") from None

        def set_rows(self: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if by_name.get(key) is tensors and isinstance(value, (list, tuple, Ragged)):
                return _set_rows(self, key, value)
            return set_field(self, key, _listed(value) if by_name.get(key) is strings else value, *args, **kwargs)

        def select(self: Any, *keys: Any, **options: Any) -> Any:
            return select_fields(self, *keys, *(EXPLAINING & set(self.keys())), **options)

        cls.__init__, cls.__getitem__, cls.__getattr__, cls.set = __init__, __getitem__, __getattr__, set_rows
        # A TensorDict that selects ("tokens", "full") calls `_select` of its Tokens.
        cls.select = cls._select = select
        for name, reader in by_name.items():
            setattr(cls, name, _field(reader, name))
        return cls

    return decorate


def short(container: Any) -> str:
    """Return the ``repr`` of a container: its rows, and what its fields hold in the first one. Makes no rows."""
    count = math.prod(container.batch_size)
    rows = f"{count:,} row{'' if count == 1 else 's'}"
    rows += f" as {tuple(container.batch_size)}" if len(container.batch_size) > 1 else ""
    rows += "; the first" if count > 1 else ""
    td = container._tensordict
    # The keys of a stack are those that all rows have, which takes as long as there are rows.
    keys = (td if flat_source(td) or not count else _first_block(td)).keys()
    held = [f"{name}{_first(td, name)}" for name in keys if name not in ("padded", "provenance")]
    return f"{type(container).__name__}({rows}: {', '.join(held)})"


def _first(td: Any, name: str) -> str:
    """Return what the first row holds: a text, the shape of a tensor, or how many messages and the text of the last."""
    with suppress(Exception):
        if isinstance(source := flat_source(td), FlatRows):
            rows: Any = source.fields[name]
            value = rows.values[: rows.lengths[0]] if isinstance(rows, Ragged) else rows[0]
        else:
            block = _first_block(td)
            value = block.get(name)
            if isinstance(value, Tensor):
                value = value[(0,) * block.batch_dims]
            elif is_non_tensor(value):
                source = flat_source(value)
                value = source.values[0] if isinstance(source, FlatObjects) else _first_block(value).data
        if isinstance(value, Tensor):
            return str([*value.shape])
        if isinstance(value, Mapping):
            messages = value["messages"]
            return f"[{len(messages)}] {shown(messages[-1]['content'])}"
        return f" {shown(value)}" if isinstance(value, str) else _first(value._tensordict, "conversation")
    return ""


# Readers -------------------------------------------------------------------------------------------------------------


def as_stored(container: Any, name: str) -> Any:
    """Return what tensordict holds for a field. None if the field is absent."""
    td = container._tensordict
    return td.get(name) if name in td.keys() else None


def is_padded(container: Any, name: str = "padded") -> bool:
    """Return whether the rows are dense; without rows, as they were stored. Refuse some that are and some that are not.

    No rows are made for that.
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
    """Return the tensor of dense rows, else one tensor per row in lists nested like the batch. None without the field.

    Dense rows of different widths are refused, and so is a stack of which only some rows are dense.
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
    if isinstance(value, NonTensorData) and isinstance(listed := _listed(value.data), list) and listed:
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
    given: Any, is_leaf: Callable[[Any], bool], expected: str, field: str, top: bool = True
) -> tuple[list[Any], Shape]:
    """Return the leaves of nested sequences in C order, and the batch shape.

    An empty sequence is a batch without leaves at the top, and an empty leaf below it.
    """
    if is_leaf(given):
        return [given], ()
    items = as_list(given)
    if not isinstance(items, list):
        kind = f"{type(given).__name__}{read_once(given)}"
        if isinstance(given, Tensor):
            kind = f"a tensor of shape {list(given.shape)}, which may hold pads"
        raise invalid(field, f"expected {expected}; got {kind}")
    if not (items or top):
        return [items], ()
    parts = [unnested(item, is_leaf, expected, field, top=False) for item in items]
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        found = ", ".join(map(str, sorted(shapes)))
        raise invalid(field, f"all lists on one level must have the same shape, but these have batch shapes {found}")
    return [leaf for leaves, _ in parts for leaf in leaves], (len(items), *(shapes.pop() if shapes else ()))


def ragged_rows(container: Any, name: str) -> Ragged:
    """Return the rows of a field of a container that is not padded, in C order. Errors are those of `ragged`.

    Do not modify them: rows that were not made yet are made from the same values.
    """
    td = container._tensordict
    if isinstance(source := flat_source(td), FlatRows):
        return source.fields[name]  # type: ignore[return-value]
    row_values = [row.get(name) for row in rows(td)]
    if not row_values:
        # The stored tensor still has their dtype and device.
        empty = td.get(name)
        return Ragged(empty.new_empty((0, *empty.shape[td.batch_dims + 1 :])), torch.zeros(0, dtype=torch.int64))
    lengths = torch.tensor(list(map(len, row_values)), dtype=torch.int64)
    try:
        return Ragged(torch.cat(of_one_width(row_values, name) if name in WIDE else row_values), lengths)
    except RuntimeError:
        return Ragged(torch.cat(of_one_width(row_values, name)), lengths)


def row_objects(td: TensorDictBase, name: str) -> list[Any]:
    """Return the value of a non-tensor entry for each row, in C order; None for rows without it."""
    if isinstance(source := flat_source(td), FlatRows):
        values: Any = source.fields.get(name)
        return [None] * td.batch_size.numel() if values is None else list(values)
    if isinstance(td, LazyStackedTensorDict):
        return [value for part in td.unbind(0) for value in row_objects(part, name)]
    value = td.get(name, None)
    return [None] * td.batch_size.numel() if value is None else objects(value, td.batch_dims)


def objects(value: Any, dims: int) -> list[Any]:
    """Return the Python objects of a non-tensor entry, one a row of a batch with `dims` dimensions, in C order."""
    if isinstance(value, NonTensorData):
        return [value.data] * math.prod(value.batch_size[:dims])
    found = value.tolist()
    for _ in range(1, dims):
        found = [leaf for part in found for leaf in part]
    return found if dims else [found]


def of_one_width(row_values: Sequence[Tensor], key: NestedKey) -> list[Tensor]:
    """Return rows that have as many values a token; those without tokens are given as many. Refuse others."""
    shape = next((values.shape[1:] for values in row_values if len(values)), row_values[0].shape[1:])
    problems = {
        row: f"has {[*values.shape[1:]]} values a token, but another row has {[*shape]}; read them apart, or give all "
        "rows the same top_logprobs or top_k"
        for row, values in enumerate(row_values)
        if len(values) and values.shape[1:] != shape
    }
    refuse(problems, str(key))
    return [values if len(values) else values.new_empty((0, *shape)) for values in row_values]


def must_have_lengths(found: Tensor, wanted: Tensor, name: str, of: str = "tokens", has: str = "has") -> None:
    """Refuse rows of a field that do not have the lengths of the tokens, or of what `of` names. int64[rows] each.

    Args:
        has: how the message begins, where something else than the field `name` is at fault.
    """
    if torch.equal(found, wanted):
        return
    if len(found) != len(wanted):
        what = f"{has} {len(found)} rows, but the tokens have {len(wanted)}"
        raise InvalidRequestError(f"{name}: {what}", field=name, problems={min(len(found), len(wanted)): what})
    differ = (found != wanted).nonzero().flatten().tolist()
    refuse({row: f"{has} {int(found[row])} values for {int(wanted[row])} {of}" for row in differ}, name)


def _without_rows(td: TensorDictBase, batch_size: torch.Size) -> TensorDict:
    """Return a TensorDict without rows, with the keys and dtypes of `td`. `batch_size` must contain a 0."""
    block, empty = _first_block(td), TensorDict({}, batch_size)
    for name in td.keys():
        value: Any = block.get(name)
        if isinstance(value, Tensor):
            value = value.new_empty((*batch_size, *value.shape[block.batch_dims :]))
        elif is_non_tensor(value):
            # tensordict cannot save an empty stack of values, but it can save a NonTensorData with an empty batch. A
            # bool (`padded`) says how rows are stored and is kept. Other values belong to rows and are dropped.
            datum = _first_block(value).data
            value = NonTensorData(datum if isinstance(datum, bool) else [], batch_size=batch_size)
        else:
            value = type(value).from_tensordict(_without_rows(value._tensordict, batch_size))
        empty.set(name, value)
    return empty


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
        raise invalid(name, f"expected {expected}; got a list of {len(values)}")
    for target, row in zip(targets, values, strict=True):
        target.set(name, row)
    return container


# Containers ----------------------------------------------------------------------------------------------------------


@field_readers(strings)
class Text(TensorClass["nocast"]):
    """The text of each row.

    Attributes:
        prompt: the prompt as the model saw it.
        response: the text of the response.
        full: the prompt and the response as the model saw them, or the whole text if rows are not split.
    """

    prompt: Strings = None
    response: Strings = None
    full: Strings = None


@field_readers(tensors, padded=is_padded)
class Tokens(TensorClass["nocast"]):
    """int64 token ids; time is the last dimension. `ContainerRequest` draws them in both layouts.

    Attributes:
        prompt: the ids of the prompt; dense: padded on the left.
        response: the ids of the response; dense: padded on the right.
        full: the prompt followed by the response; dense: with the pads of both.
        padded: whether the rows are dense.
    """

    prompt: Tensors = None
    response: Tensors = None
    full: Tensors = None
    padded: bool = True

    @classmethod
    def from_rows(cls, *, prompt: Any = None, response: Any = None, full: Any = None) -> Tokens:
        """Build from rows of their own length, which have no pads and need no masks.

        ``Tokens.from_rows(prompt=[[5, 17], [300]])`` has batch ``(2,)``, one list of ids has batch ``()``, and lists of
        lists of rows have batch ``(B, n)``. A row may also be a tensor or an array of one dimension.

        Args:
            prompt: the rows of the prompts.
            response: the rows of the responses.
            full: the rows of both; None joins them if both are given.

        Raises:
            InvalidRequestError: a row is malformed, or the fields do not fit each other; `rows` are the rows at fault.
        """
        return container_of_rows(cls, torch.int64, {"prompt": prompt, "response": response, "full": full})


@field_readers(tensors, padded=is_padded)
class Masks(TensorClass["nocast"]):
    """Masks, bool, each shaped like ``tokens.full``.

    Attributes:
        all_attention_mask: True where there is a token, False in pads.
        all_assistant_mask: True where a token is the assistant's.
        all_response_mask: True where a token is part of the response.
        padded: whether the rows are dense.
    """

    all_attention_mask: Tensors = None
    all_assistant_mask: Tensors = None
    all_response_mask: Tensors = None
    padded: bool = True

    @classmethod
    def from_rows(
        cls, *, all_attention_mask: Any = None, all_assistant_mask: Any = None, all_response_mask: Any = None
    ) -> Masks:
        """Build from rows as long as those of ``tokens.full``, of True and False or 1 and 0. See `Tokens.from_rows`."""
        given = {
            "all_attention_mask": all_attention_mask,
            "all_assistant_mask": all_assistant_mask,
            "all_response_mask": all_response_mask,
        }
        return container_of_rows(cls, torch.bool, given)


def _provenance(container: Any, name: str) -> Any:
    """Return the provenance that all rows share, else a tuple of the distinct ones in order, else None."""
    # Rows made together share their datum, and most are, so each datum is read once.
    data = {id(datum): datum for datum in row_objects(container._tensordict, name) if datum}
    found = tuple(dict.fromkeys(map(as_provenance, data.values())))
    return found if len(found) > 1 else next(iter(found), None)


def as_provenance(datum: Mapping[str, Any]) -> Provenance:
    """Return the provenance that a container stores as plain data."""
    # JSON knows no tuples. What was stored before 1.1 has no runs.
    runs = {name: tuple(map(tuple, datum.get(name, ()))) for name in ("penalties", "version_runs")}
    return Provenance(**{**datum, **runs})


_INTEGERS = (SETS, COUNTS, "top_ids")


@field_readers(tensors, padded=is_padded, provenance=_provenance)
class LogProbs(TensorClass["nocast"]):
    """Log-probabilities, float32, in nats, shaped like the fields of `Tokens` with the same names.

    Attributes:
        prompt: those of the prompt's tokens.
        response: those of the response's tokens.
        full: those of all tokens.
        scored_mask: bool, shaped like `full`: where it is False, the log-probability is 0.0 and means nothing.
        padded: whether the rows are dense.
        provenance: the distribution of the numbers; a tuple if rows differ.
        kept_ids: int64: the ids that truncation had left when each token was sampled, those of all tokens of
            a row one after another; dense: padded on the right with -1. Numbers of truncated support are
            normalised over them. `corelm.token_sets` reads them.
        kept_counts: int64, shaped like `full`: how many of them belong to each token. 0 stands for the whole
            vocabulary, and for a token that was not scored.
        kept_log_mass: float32, shaped like `full`: the log of the probability that these ids had together
            before truncation. Log-prob + log mass is the log-prob under the whole tempered distribution.
        top_ids: int64, shaped like `full` with a last dimension of k: the most probable ids at each position, the most
            probable first, or those that the caller gave; -1 where there are fewer, where nothing is scored, in pads.
        top_log_probs: float32, like `top_ids`: their log-probabilities; -inf where there are fewer, 0.0 in pads.
        tail_log_mass: float32, shaped like `full`: the log of the probability that all other ids have together.
    """

    prompt: Tensors = None
    response: Tensors = None
    full: Tensors = None
    scored_mask: Tensors = None
    padded: bool = True
    provenance: Provenance | tuple[Provenance, ...] | None = None
    kept_ids: Tensors = None
    kept_counts: Tensors = None
    kept_log_mass: Tensors = None
    top_ids: Tensors = None
    top_log_probs: Tensors = None
    tail_log_mass: Tensors = None

    @classmethod
    def from_rows(
        cls,
        *,
        prompt: Any = None,
        response: Any = None,
        full: Any = None,
        scored_mask: Any = None,
        provenance: Provenance | None = None,
        kept_ids: Any = None,
        kept_counts: Any = None,
        kept_log_mass: Any = None,
        top_ids: Any = None,
        top_log_probs: Any = None,
        tail_log_mass: Any = None,
    ) -> LogProbs:
        """Build from rows as long as those of `Tokens`. See `Tokens.from_rows`.

        Args:
            scored_mask: without it, every log-prob counts.
            provenance: the distribution of all rows, if it is known.
            kept_ids: `TokenSets` as long as `full`, or, together with `kept_counts`, the ids of each row.
        """
        if isinstance(kept_ids, TokenSets) and kept_counts is None:
            kept_ids, kept_counts = kept_ids.flat, kept_ids.counts
        elif (kept_ids is None) is not (kept_counts is None) or isinstance(kept_ids, TokenSets):
            raise InvalidRequestError(
                "LogProbs.kept_ids: rows of ids need kept_counts, how many of them belong to each token; pass both, or "
                "kept_ids=TokenSets.from_list([[[5, 17], []], [[300]]]) alone, with a list of ids for each token",
                field="kept_ids",
            )
        given = {"prompt": prompt, "response": response, "full": full, "scored_mask": scored_mask}
        given |= {"kept_ids": kept_ids, "kept_counts": kept_counts, "kept_log_mass": kept_log_mass}
        given |= {"top_ids": top_ids, "top_log_probs": top_log_probs, "tail_log_mass": tail_log_mass}
        floats = dict.fromkeys(given, torch.float32) | dict.fromkeys(_INTEGERS, torch.int64)
        known = {} if provenance is None else {"provenance": provenance.to_dict()}
        return container_of_rows(cls, {**floats, "scored_mask": torch.bool}, given, known)

    # Stored as plain data, so that memmap writes JSON and not a pickle.
    def set(self, key: NestedKey, value: Any, *args: Any, **kwargs: Any) -> LogProbs:
        value = value.to_dict() if isinstance(value, Provenance) else value
        return super().set(key, value, *args, **kwargs)


@field_readers(tensors, padded=is_padded)
class PerToken(TensorClass["nocast"]):
    """A number for each token, such as a penalty or a weight, for rows that are not padded.

    A TensorDict cannot hold such rows directly. Dense numbers need no container: they are plain tensors.

    Attributes:
        full: float, as long as ``tokens.full``; 0.0 where the number means nothing. The `argmax` of scores is
            int64, and -1 where nothing was scored. In pads, floats are 0.0 and integers -1.
        padded: whether the rows are dense.
    """

    full: Tensors = None
    padded: bool = True

    @classmethod
    def from_rows(cls, *, full: Any) -> PerToken:
        """Build from rows as long as those of ``tokens.full``. See `Tokens.from_rows`."""
        return container_of_rows(cls, torch.float32, {"full": full})


# Rows of their own length -------------------------------------------------------------------------------------------

_COUNTED = {1: "one dimension", 2: "two dimensions, [tokens, k]"}


def container_of_rows(
    cls: type[C],
    dtype: torch.dtype | Mapping[str, torch.dtype],
    given: Mapping[str, Any],
    objects: Mapping[str, Any] | None = None,
) -> C:
    """Return a container that is not padded, from the rows `given` for its fields; None stands for no rows.

    `full` is the prompt followed by the response, if both are given. All rows share the `objects`.
    """
    fields: dict[str, Ragged] = {}
    shapes: dict[str, Shape] = {}
    for name, value in given.items():
        if value is not None:
            fields[name], shapes[name] = read_rows(
                value, dtype if isinstance(dtype, torch.dtype) else dtype[name], name
            )
    if not fields:
        raise InvalidRequestError(f"{cls.__name__}: pass the rows of a field: {', '.join(given)}", field="full")
    if len({*shapes.values()}) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InvalidRequestError(f"{cls.__name__}: the fields have different batches: {found}", field=[*fields][-1])
    _complete(fields)
    shape = next(iter(shapes.values()))
    count = len(next(iter(fields.values())))
    shared = {name: [value] * count for name, value in (objects or {}).items()}
    return cls.from_tensordict(lazy_rows({**fields, **shared}, shape))


def _complete(fields: dict[str, Ragged]) -> None:
    """Add `full`, the prompt followed by the response, and refuse rows in which the fields do not fit each other."""
    prompt, response, full = (fields.get(name) for name in ("prompt", "response", "full"))
    if response is None and full is not None and prompt is not None:
        response = full.slice(prompt.lengths)
    if prompt is not None and response is not None:
        joined = fields["full"] = prompt.join(response)
        if full is not None:
            pairs = enumerate(zip(joined.tolist(), full.tolist(), strict=True))
            wrong = {row: "is not the prompt followed by the response" for row, (one, two) in pairs if one != two}
            refuse(wrong, "full")
    if SETS in fields:
        must_have_lengths(fields[SETS].lengths, fields[COUNTS].sums(), SETS, f"in {COUNTS}")
    # What is left are fields as long as the whole row, such as masks.
    first, *others = [name for name in fields if name not in ("prompt", "response", SETS)] or ["prompt"]
    for name in others:
        must_have_lengths(fields[name].lengths, fields[first].lengths, name, f"in {first}")


def read_rows(given: Any, dtype: torch.dtype, field: str) -> tuple[Ragged, Shape]:
    """Return the rows of a field, and the batch shape. A row has one value a token, or in a field of `WIDE` a row."""
    dims = 2 if field in WIDE else 1
    if isinstance(given, Tensor) and given.is_nested:
        given = list(given.unbind())
    elif isinstance(given, Ragged):
        given = list(given.split())
    expected = f"a list of rows, each a list or a tensor of {_COUNTED[dims]}"
    rows, shape = unnested(given, lambda one: _is_row(one, dims), expected, field)
    tensors, problems = [], {}
    for number, row in enumerate(rows):
        try:
            tensors.append(_row(row, dtype, dims))
        except Exception as error:  # the object's own methods may raise anything
            problems[number] = f"{error}, got {shown(row)}"
    refuse(problems, field)
    if dims > 1 and tensors:
        tensors = of_one_width(tensors, field)
    lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
    return Ragged(torch.cat(tensors) if tensors else torch.empty((0,) * dims, dtype=dtype), lengths), shape


def _is_row(given: Any, dims: int) -> bool:
    """Return whether this is a row: numbers in so many dimensions, as a tensor, an array or lists."""
    if isinstance(given, Tensor):
        return not unreadable(given) and given.ndim == dims
    if _is_array(given):
        return bool(given.ndim == dims)
    values = as_list(given)
    if not isinstance(values, list):
        return False
    if any(isinstance(one, (int, float)) or getattr(one, "ndim", 1) == 0 for one in values):
        return True
    return dims > 1 and any(_is_row(one, dims - 1) for one in values)


def _is_array(given: Any) -> bool:
    return getattr(getattr(given, "dtype", None), "kind", "O") in "biuf"


def _row(row: Any, dtype: torch.dtype, dims: int) -> Tensor:
    """Return one row in `dtype`, which must hold all of its values."""
    if not _is_array(row):
        row = as_list(row)
    if isinstance(row, list):
        # Lists of numpy's or torch's own scalars are read as well, if slowly.
        row = [item.tolist() if hasattr(item, "tolist") else item for item in row]
    tensor = row if isinstance(row, Tensor) else as_tensor(row)
    if not tensor.numel():
        return tensor.new_empty(tensor.shape if tensor.ndim == dims else (0,) * dims, dtype=dtype)
    floats, bools = tensor.dtype.is_floating_point, tensor.dtype == torch.bool
    if dtype == torch.int64 and (floats or bools):
        raise TypeError("expected token ids")
    if dtype == torch.bool and not bools and bool(((tensor != 0) & (tensor != 1)).any()):
        raise TypeError("expected True and False, or 1 and 0")
    if tensor.ndim != dims or tensor.dtype.is_complex or (dtype == torch.float32 and bools):
        raise TypeError("expected numbers")
    return tensor.to(dtype)
