"""What a caller may pass → what the records hold. Friendly in what it takes; everything else is refused by name."""

from __future__ import annotations

import operator
import reprlib
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from corelm.errors import InvalidRequestError, Problems, refuse
from corelm.tensors.ragged import Ragged


def rows_of_ids(ids: Any, field: str) -> Ragged:
    """int64 rows from a Ragged, a list of lists, tensors or arrays, or an integer tensor or array ``[rows, time]``.

    Raises:
        InvalidRequestError: anything else, naming the row.
    """
    if hasattr(ids, "__array__") and not isinstance(ids, Tensor):
        ids = torch.as_tensor(ids)
    if isinstance(ids, Tensor):
        if ids.ndim != 2:
            raise InvalidRequestError(
                f"{field}: expected one row per sequence, got a tensor of shape {tuple(ids.shape)}", field=field
            )
        ids = Ragged(ids.reshape(-1), torch.full((ids.shape[0],), ids.shape[1]))
    if not isinstance(ids, Ragged):
        ids = _from_rows(ids, field)
    if not _whole(ids.values) or ids.values.ndim != 1:
        raise InvalidRequestError(
            f"{field}: token ids are integers, one after another; got {ids.values.dtype}{list(ids.values.shape)}",
            field=field,
        )
    try:
        # Made anew, as the caller may have written to the lengths since they were checked.
        return Ragged(ids.values.to(torch.int64), ids.lengths)
    except ValueError as error:
        raise InvalidRequestError(f"{field}: {error}", field=field) from error


def _from_rows(rows: Any, field: str) -> Ragged:
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise InvalidRequestError(
            f"{field}: expected rows of token ids, got {reprlib.repr(rows)}; backend.tokenize makes them of texts",
            field=field,
        )
    read: list[Tensor] = []
    problems: Problems = {}
    for index, row in enumerate(rows):
        try:
            read.append(_row(row))
        except (TypeError, ValueError, OverflowError, RuntimeError):
            problems[index] = f"expected a list of token ids that fit into int64, got {reprlib.repr(row)}"
    refuse(problems, field)
    return Ragged.from_list(read)


def _row(row: Any) -> Tensor:
    if hasattr(row, "__array__"):
        tensor = torch.as_tensor(row)
        if tensor.ndim != 1 or not _whole(tensor):
            raise TypeError
        return tensor
    if not isinstance(row, (list, tuple)) or any(isinstance(token, bool) for token in row):
        raise TypeError
    return torch.tensor([operator.index(token) for token in row], dtype=torch.int64)


def _whole(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def texts(given: Any) -> tuple[str, ...]:
    """One text is one row."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable):
        raise InvalidRequestError(f"texts: expected a str or a list of them, got {reprlib.repr(given)}", field="texts")
    found = tuple(given)
    refuse(not_texts(found), "texts")
    return found


def not_texts(values: Sequence[Any]) -> Problems:
    return {row: f"expected a str, got {type(v).__name__}" for row, v in enumerate(values) if not isinstance(v, str)}


def request_ids(given: Sequence[str] | None, rows: int) -> tuple[str, ...]:
    """One unique name per row, made up here unless given."""
    if given is None:
        return tuple(uuid.uuid4().hex for _ in range(rows))
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [None]
    if len(names) != rows or not all(isinstance(name, str) for name in names) or len({*names}) != rows:
        raise InvalidRequestError(
            f"request_ids: expected {rows} different names, got {reprlib.repr(given)}", field="request_ids"
        )
    return tuple(name for name in names if name is not None)


def seeds(given: Any, answers: int) -> Tensor:
    """int64[answers], not negative."""
    found = _integers(given, answers, "seeds")
    if bool((found < 0).any()):
        raise InvalidRequestError("seeds: expected numbers in [0, 2**63), got a negative one", field="seeds")
    return found


def starts(given: Any, rows: int) -> Tensor:
    """int64[rows]: where scoring starts, from one position for all or one per row. Position 0 is never scored."""
    if given is None:
        return torch.ones(rows, dtype=torch.int64)
    return _integers([given] * rows if isinstance(given, int) else given, rows, "score_from").clamp_min(1)


def _integers(given: Any, count: int, field: str) -> Tensor:
    try:
        found = torch.as_tensor(given if hasattr(given, "__array__") else [operator.index(value) for value in given])
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found = torch.empty(0, 0)
    found = found.to(torch.int64) if found.numel() == 0 and count == 0 else found
    if found.shape != (count,) or not _whole(found):
        raise InvalidRequestError(f"{field}: expected {count} integers, got {reprlib.repr(given)}", field=field)
    return found.to("cpu", torch.int64)
