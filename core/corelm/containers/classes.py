"""The containers that every engine fills in the same way (`Text`, `Tokens`, `Masks`, `LogProbs`, `ChatHistory`), and
`PerToken` for values computed from them.

Each is a TensorClass: it slices, stacks, saves and moves with the TensorDict that holds it. With batch ``(B,)``, fields
read as::

    td["tokens"].response         # dense: int64[B, width]; otherwise a list of B tensors
    td["text"].response           # a list of B strings
    td["log_probs"].provenance    # one Provenance, or a tuple of them if rows differ

With batch ``()`` a field is one tensor or one string, with ``(B, n)`` a list of lists. A field that is absent
reads as None and is not among the keys. A field can be set to any value of the kind that it returns.
`from_rows` makes a container of rows of their own length; one made with the constructor is dense, unless you
pass ``padded=False``. Call `ragged` for flat values in either layout.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, NestedKey, NonTensorData, NonTensorStack, TensorClass, TensorDict
from torch import Tensor

from corelm.containers.fields import (
    COUNTS,
    SETS,
    WIDE,
    as_stored,
    field_readers,
    is_padded,
    must_have_lengths,
    row_objects,
    strings,
    tensors,
    unnested,
)
from corelm.containers.history import History
from corelm.errors import InvalidRequestError, Problems, spelled_out
from corelm.spec.provenance import Provenance
from corelm.tensors.lazy_rows import Shape, lazy_rows
from corelm.tensors.ragged import Ragged, as_tensor, unreadable
from corelm.tensors.token_sets import TokenSets
from corelm.validate import as_list, shown

C = TypeVar("C", bound=TensorClass)
Strings = Any  # str, list[str], list[list[str]] …: nested like the batch
Tensors = Any  # Tensor, or list[Tensor], list[list[Tensor]] …: nested like the batch


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
        given = {"prompt": prompt, "response": response, "full": full}
        return container_of_rows(cls, torch.int64, given)


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
            prompt: the rows of the prompts.
            response: the rows of the responses.
            full: the rows of both; None joins them if both are given.
            scored_mask: as long as `full`; without it, every log-prob counts.
            provenance: the distribution of all rows, if it is known.
            kept_ids: `TokenSets` as long as `full`, or, together with `kept_counts`, the ids of each row.
            kept_counts: as long as `full`: how many of the ids of its row belong to each token.
            kept_log_mass: as long as `full`.
            top_ids: as long as `full`, with a row of k ids for each token.
            top_log_probs: like `top_ids`.
            tail_log_mass: as long as `full`.
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


@field_readers(as_stored)
class ChatHistory(TensorClass["nocast"]):
    """Conversations. Append a message to `full` to get the prompt of the next turn.

    Attributes:
        prompt: the conversation before the response.
        response: the messages of the response.
        full: the prompt followed by the response.
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None


#: Pass these to ``torch.serialization.add_safe_globals``, so that ``torch.load(file, weights_only=True)`` can
#: read containers.
SAFE_GLOBALS = (
    *(Text, Tokens, Masks, LogProbs, PerToken, ChatHistory, History),
    *(TensorDict, LazyStackedTensorDict, NonTensorData, NonTensorStack),
    copyreg.dispatch_table[TensorDict](TensorDict({}))[0],  # the function with which tensordict unpickles
)


# Rows of their own length -------------------------------------------------------------------------------------------

_COUNTED = {1: "one dimension", 2: "two dimensions, [tokens, k]"}


def container_of_rows(
    cls: type[C],
    dtype: torch.dtype | Mapping[str, torch.dtype],
    given: Mapping[str, Any],
    objects: Mapping[str, Any] | None = None,
) -> C:
    """Return a container that is not padded, from the rows of its fields.

    `full` is the prompt followed by the response, if both are given.

    Args:
        cls: the class of the container.
        dtype: of all fields, or of each by name.
        given: what the caller passed for each field; None for nothing.
        objects: Python objects that all rows share, by field.

    Raises:
        InvalidRequestError: no field is given, a row is malformed, or the fields do not fit each other;
            `field` names the field, `rows` the rows at fault.
    """
    fields: dict[str, Ragged] = {}
    shapes: dict[str, Shape] = {}
    for name, value in given.items():
        if value is not None:
            wanted = dtype if isinstance(dtype, torch.dtype) else dtype[name]
            fields[name], shapes[name] = _read(value, wanted, f"{cls.__name__}.{name}", name)
    if not fields:
        raise InvalidRequestError(f"{cls.__name__}: pass the rows of a field: {', '.join(given)}", field="full")
    if len({*shapes.values()}) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InvalidRequestError(f"{cls.__name__}: the fields have different batches: {found}", field=[*fields][-1])
    _complete(cls.__name__, fields)
    shape = next(iter(shapes.values()))
    count = len(next(iter(fields.values())))
    shared = {name: [value] * count for name, value in (objects or {}).items()}
    return cls.from_tensordict(lazy_rows({**fields, **shared}, shape))


def _complete(container: str, fields: dict[str, Ragged]) -> None:
    """Add `full`, the prompt followed by the response, and refuse rows in which the fields do not fit each other."""
    prompt, response, full = (fields.get(name) for name in ("prompt", "response", "full"))
    if response is None and full is not None and prompt is not None:
        response = full.slice(prompt.lengths, full.lengths)
    if prompt is not None and response is not None:
        joined = fields["full"] = prompt.join(response)
        if full is not None:
            pairs = enumerate(zip(joined.tolist(), full.tolist(), strict=True))
            wrong = {row: "is not the prompt followed by the response" for row, (one, two) in pairs if one != two}
            _refuse(wrong, f"{container}.full", "full")
    if SETS in fields:
        must_have_lengths(fields[SETS].lengths, fields[COUNTS].sums(), SETS, f"in {COUNTS}")
    # What is left are fields as long as the whole row, such as masks.
    first, *others = [name for name in fields if name not in ("prompt", "response", SETS)] or ["prompt"]
    for name in others:
        must_have_lengths(fields[name].lengths, fields[first].lengths, name, f"in {first}")


def _read(given: Any, dtype: torch.dtype, what: str, field: str) -> tuple[Ragged, Shape]:
    """Return the rows of a field, and the batch shape. A row has one value a token, or in a field of `WIDE` a row."""
    dims = 2 if field in WIDE else 1
    if isinstance(given, Tensor) and given.is_nested:
        given = list(given.unbind())
    elif isinstance(given, Ragged):
        given = list(given.split())
    expected = f"a list of rows, each a list or a tensor of {_COUNTED[dims]}"
    rows, shape = unnested(given, lambda one: _is_row(one, dims), expected, what, field)
    tensors, problems = [], {}
    for number, row in enumerate(rows):
        try:
            tensors.append(_row(row, dtype, dims))
        except Exception as error:  # the object's own methods may raise anything
            problems[number] = f"{error}, got {shown(row)}"
    _refuse(problems, what, field)
    if dims > 1:
        tensors = _of_one_width(tensors, what, field)
    lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
    return Ragged(torch.cat(tensors) if tensors else torch.empty((0,) * dims, dtype=dtype), lengths), shape


def _of_one_width(rows: list[Tensor], what: str, field: str) -> list[Tensor]:
    """Return tables of the same width; those without tokens are given it."""
    width = next((row.shape[1] for row in rows if row.numel()), 0)
    wrong = {
        number: f"has {row.shape[1]} values a token, but another row has {width}"
        for number, row in enumerate(rows)
        if row.numel() and row.shape[1] != width
    }
    _refuse(wrong, what, field)
    return [row if row.numel() else row.new_empty(len(row), width) for row in rows]


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
    if dtype == torch.bool and not bools and (floats or bool(((tensor != 0) & (tensor != 1)).any())):
        raise TypeError("expected True and False, or 1 and 0")
    if tensor.ndim != dims or tensor.dtype.is_complex or (dtype == torch.float32 and bools):
        raise TypeError("expected numbers")
    return tensor.to(dtype)


def _refuse(problems: Problems, what: str, field: str) -> None:
    if problems:
        raise InvalidRequestError(f"{what}: {spelled_out(problems)}", field=field, problems=problems)
