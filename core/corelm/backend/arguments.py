"""Coerce what callers pass to what the records hold. An argument of another kind is refused with its name."""

from __future__ import annotations

import operator
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from corelm.errors import Problems, described, refuse
from corelm.tensors.ragged import Ragged, unreadable
from corelm.validate import invalid, is_bool, is_index, shown, unencodable


def rows_of_ids(ids: Any, field: str) -> Ragged:
    """Return int64 rows.

    Args:
        ids: a `Ragged`; a list of lists, tensors or arrays; an integer tensor or array ``[rows, time]``; or a nested
            tensor, which has one row per sequence.
        field: the argument's name, for errors.

    Raises:
        InvalidRequestError: `ids` is of another kind; if some rows are at fault, `rows` names them.
    """
    if hasattr(ids, "__array__") and not isinstance(ids, Tensor):
        ids = _tensor(ids, field)
    if isinstance(ids, Tensor) and ids.is_nested:
        ids = ids.unbind()
    if isinstance(ids, Tensor):
        refuse_unreadable(ids, field)
        if ids.ndim != 2:
            raise invalid(field, f"expected one row per sequence, got a tensor of shape {tuple(ids.shape)}")
        ids = Ragged(ids.reshape(-1), torch.full((ids.shape[0],), ids.shape[1]))
    if not isinstance(ids, Ragged):
        ids = _from_rows(ids, field)
    refuse_unreadable(ids.values, field)
    refuse_unreadable(ids.lengths, field)
    for values, of_what in ((ids.values, "token"), (ids.lengths, "length")):
        if not _is_integer(values) or values.ndim != 1:
            raise invalid(field, f"expected one integer per {of_what}, got {values.dtype}{list(values.shape)}")
    try:
        # Build and validate new rows: the caller may have modified the lengths since they were checked.
        return Ragged(ids.values.to(torch.int64), ids.lengths)
    except ValueError as error:
        raise invalid(field, str(error)) from error


def refuse_unreadable(values: Any, field: str) -> None:
    """Refuse what is not a plain tensor with values in memory.

    Raises:
        InvalidRequestError: a tensor on the meta device, a sparse or nested tensor, or no tensor at all.
    """
    why = unreadable(values)
    if why:
        raise invalid(field, f"expected a dense tensor, got {why}")


def _from_rows(rows: Any, field: str) -> Ragged:
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise invalid(field, f"expected rows of token ids, got {shown(rows)}; backend.tokenize turns texts into ids")
    tensors: list[Tensor] = []
    problems: Problems = {}
    try:
        rows = list(rows)
    except Exception as error:  # the object's own methods may raise anything
        raise invalid(
            field, f"expected rows of token ids, and {type(rows).__name__} fails: {described(error)}"
        ) from error
    for index, row in enumerate(rows):
        try:
            tensors.append(_row(row))
        except Exception:  # the object's own methods may raise anything
            problems[index] = f"expected a list of token ids (int64), got {shown(row)}"
    refuse(problems, field)
    return Ragged.from_list(tensors)


def _row(row: Any) -> Tensor:
    if hasattr(row, "__array__"):
        tensor = torch.as_tensor(row)
        if unreadable(tensor) or tensor.ndim != 1 or not _is_integer(tensor):
            raise TypeError
        return tensor
    # Types first: a row has thousands of ids, and most are plain ints.
    if not isinstance(row, (list, tuple)) or (not {*map(type, row)} <= {int} and any(map(is_bool, row))):
        raise TypeError
    return torch.tensor([operator.index(token) for token in row], dtype=torch.int64)


def _tensor(array: Any, field: str) -> Tensor:
    try:
        return torch.as_tensor(array)
    except Exception as error:  # an array of objects or texts, for example
        raise invalid(field, f"expected an array of integers: {described(error)}") from error


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def texts(given: Any) -> tuple[str, ...]:
    """Return one text per row; a single str is one row."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise invalid("texts", f"expected a str or a list of str, got {shown(given)}")
    try:
        found = tuple(given)
    except Exception as error:  # the object's own methods may raise anything
        raise invalid(
            "texts", f"expected a list of str, and {type(given).__name__} fails: {described(error)}"
        ) from error
    refuse(not_texts(found), "texts")
    return found


def not_texts(values: Sequence[Any]) -> Problems:
    """Return a problem for every row that is not a str, or that no tokenizer can encode."""
    found = ((row, _not_a_text(value)) for row, value in enumerate(values))
    return {row: what for row, what in found if what}


def _not_a_text(value: Any) -> str | None:
    return unencodable(value) if isinstance(value, str) else f"expected a str, got {type(value).__name__}"


def request_ids(given: Sequence[str] | None, rows: int) -> tuple[str, ...]:
    """Return one unique name per row: the given names, or generated ones."""
    if given is None:
        return tuple(uuid.uuid4().hex for _ in range(rows))
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [None]
    if len(names) != rows or not all(isinstance(name, str) for name in names) or len({*names}) != rows:
        raise invalid("request_ids", f"expected {rows} different names, got {shown(given)}")
    return tuple(name for name in names if name is not None)


def seeds(given: Any, answers: int) -> Tensor:
    """Return int64[answers], each seed in [0, 2**63)."""
    found = _integers(given, answers, "seeds")
    if bool((found < 0).any()):
        raise invalid("seeds", "expected integers in [0, 2**63), got a negative one")
    return found


def starts(given: Any, rows: int) -> Tensor:
    """Return int64[rows], each at least 1: the position where scoring starts. Position 0 is never scored.

    Args:
        given: one position for all rows, or one per row; None scores every position from 1 on.
    """
    if given is None:
        return torch.ones(rows, dtype=torch.int64)
    return _integers([given] * rows if is_index(given) else given, rows, "score_from").clamp_min(1)


def _index(given: Any) -> int:
    if is_bool(given):
        raise TypeError
    return operator.index(given)


def _integers(given: Any, count: int, field: str) -> Tensor:
    try:
        found = torch.as_tensor(given if hasattr(given, "__array__") else [_index(value) for value in given])
    except Exception:  # the object's own methods may raise anything
        found = torch.empty(0, 0)
    if unreadable(found):
        raise invalid(field, f"expected {count} integers, got {unreadable(found)}")
    found = found.to(torch.int64) if found.numel() == 0 and count == 0 else found
    if found.shape != (count,) or not _is_integer(found):
        raise invalid(field, f"expected {count} integers, got {shown(given)}")
    return found.to("cpu", torch.int64)
