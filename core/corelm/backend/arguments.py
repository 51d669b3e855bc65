"""Coerce what callers pass to what the records hold. An argument of another kind is refused with its name."""

from __future__ import annotations

import operator
import uuid
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from corelm.errors import InvalidRequestError, Problems, described, refuse, spelled_out
from corelm.tensors.ragged import Ragged, as_tensor, unreadable
from corelm.validate import as_list, invalid, is_bool, is_index, read_once, shown, unencodable

if TYPE_CHECKING:
    from corelm.backend.engine import OpenEngine

_WITHOUT_PADS = "pass a list with the ids of each row, without pads"


def rows_of_ids(ids: Any, field: str, engine: OpenEngine | None = None) -> Ragged:
    """Return int64 rows.

    Args:
        ids: a `Ragged`; a list or Series of lists, tensors or arrays; an integer tensor or array ``[rows, time]``; or
            a nested tensor, which has one row per sequence.
        field: the argument's name, for errors.
        engine: its pads are refused in a tensor or array, which has no mask here; None looks for no pads.

    Raises:
        InvalidRequestError: `ids` is of another kind; if some rows are at fault, `rows` names them.
    """
    if hasattr(ids, "__array__") and not isinstance(ids, Tensor):
        # The elements of a Series of lists are no numbers.
        numbers = getattr(getattr(ids, "dtype", None), "kind", "O") in "biufc"
        ids = _tensor(ids, field) if numbers else as_list(ids)
    if isinstance(ids, Tensor) and ids.is_nested:
        ids = ids.unbind()
    if isinstance(ids, Tensor):
        refuse_unreadable(ids, field)
        if ids.ndim != 2:
            raise invalid(field, f"expected one row per sequence, got a tensor of shape {tuple(ids.shape)}")
        ids = Ragged(ids.reshape(-1), torch.full((ids.shape[0],), ids.shape[1]))
        if engine is not None:
            refuse_pads(ids, engine.tokenizer, engine.eos_token_ids, field, _WITHOUT_PADS)
    if not isinstance(ids, Ragged):
        return _from_rows(ids, field)
    refuse_unreadable(ids.values, field)
    refuse_unreadable(ids.lengths, field)
    for values, of_what in ((ids.values, "token"), (ids.lengths, "length")):
        if not _is_integer(values) or values.ndim != 1:
            raise invalid(field, f"expected one integer per {of_what}, got {values.dtype}{list(values.shape)}")
    try:
        # Build and validate new rows: the caller may have modified the lengths since they were checked.
        return Ragged(ids.values if ids.values.dtype == torch.int64 else ids.values.to(torch.int64), ids.lengths)
    except ValueError as error:
        raise invalid(field, str(error)) from error


def refuse_pads(ids: Ragged, tokenizer: Any, eos_ids: Collection[int], field: str, advice: str) -> None:
    """Refuse rows of a dense tensor without a mask that begin or end with the tokenizer's pad id.

    Many tokenizers pad with EOS or BOS, which may also be a token at an edge: if every row begins, or ends, with one,
    the first, or last, is no pad. Padding to the longest row leaves that row without pads.

    Args:
        ids: the rows, with their pads.
        tokenizer: names its pad id; without one, EOS is taken for it, as dense results do.
        eos_ids: all ids that end an answer.
        field: what is at fault, for the error.
        advice: what to do about it.

    Raises:
        InvalidRequestError: such rows; `rows` names them.
    """
    eos, bos = (getattr(tokenizer, name, None) for name in ("eos_token_id", "bos_token_id"))
    pad = getattr(tokenizer, "pad_token_id", None)
    pad = eos if pad is None else pad
    if pad is None or not bool((ids.values == pad).any()):
        return
    problems: Problems = {}
    for edge, where in ((ids.to_padded(-1), "begins"), (ids.to_padded(-1, "left").flip(-1), "ends")):
        pads = (edge == pad).cumprod(-1).sum(-1)
        token = pad in {eos, bos, *eos_ids} and bool((pads > 0).all())
        for row in (pads > int(token)).nonzero().flatten().tolist():
            problems.setdefault(row, f"{where} with the pad id {pad}, {int(pads[row])} times")
    if problems:
        raise InvalidRequestError(
            f"{field}: {spelled_out(problems)}. Without an attention mask, pads would be read as tokens; {advice}",
            field=field,
            problems=problems,
        )


def refuse_unreadable(values: Any, field: str) -> None:
    """Refuse what is not a plain tensor with values in memory.

    Raises:
        InvalidRequestError: a tensor on the meta device, a sparse or nested tensor, or no tensor at all.
    """
    why = unreadable(values)
    if why:
        raise invalid(field, f"expected a dense tensor, got {why}")


def _from_rows(rows: Any, field: str) -> Ragged:
    if isinstance(rows, Mapping):
        what = type(rows).__name__
        raise invalid(field, f"expected rows of token ids, got {what}; pass its 'input_ids', tokenized without padding")
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise invalid(field, f"expected rows of token ids, got {shown(rows)}; backend.tokenize turns texts into ids")
    found: list[Tensor | array[int]] = []
    problems: Problems = {}
    try:
        rows = list(rows)
    except Exception as error:  # the object's own methods may raise anything
        raise invalid(
            field, f"expected rows of token ids, and {type(rows).__name__} fails: {described(error)}"
        ) from error
    for index, row in enumerate(rows):
        try:
            found.append(_row(row))
        except Exception:  # the object's own methods may raise anything
            problems[index] = f"expected a list of token ids (int64), got {shown(row)}"
    refuse(problems, field)
    return Ragged.from_list(found)


def _row(row: Any) -> Tensor | array[int]:
    if hasattr(row, "__array__"):
        tensor = as_tensor(row)
        if unreadable(tensor) or tensor.ndim != 1 or not _is_integer(tensor):
            raise TypeError
        return tensor
    # Types first: a row has thousands of ids, and most are plain ints.
    if not isinstance(row, (list, tuple)):
        raise TypeError
    kinds = {*map(type, row)}
    if not kinds <= {int} and any(map(is_bool, row)):
        raise TypeError
    return array("q", row if kinds <= {int} else map(operator.index, row))


def _tensor(array: Any, field: str) -> Tensor:
    try:
        return as_tensor(array)
    except Exception as error:  # an array of objects or texts, for example
        raise invalid(field, f"expected an array of integers: {described(error)}") from error


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def texts(given: Any) -> tuple[str, ...]:
    """Return one text per row of a sequence of texts (see `as_list`); a single str is one row."""
    given = as_list(given)
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list):
        raise invalid("texts", f"expected a str or a list of str, got {shown(given)}{read_once(given)}")
    found = tuple(given)
    refuse(not_texts(found), "texts")
    return found


def not_texts(values: Sequence[Any]) -> Problems:
    """Return a problem for every row that is not a str, or that no tokenizer can encode."""
    return {row: what for row, value in enumerate(values) if (what := _not_a_text(value))}


def _not_a_text(value: Any) -> str | None:
    return unencodable(value) if isinstance(value, str) else f"expected a str, got {type(value).__name__}"


def request_ids(given: Sequence[str] | None, rows: int) -> tuple[str, ...]:
    """Return one unique name per row: the given names, or generated ones."""
    if given is None:
        return tuple([uuid.uuid4().hex for _ in range(rows)])
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
        found = as_tensor(given if hasattr(given, "__array__") else [_index(value) for value in given])
    except Exception:  # the object's own methods may raise anything
        found = torch.empty(0, 0)
    if unreadable(found):
        raise invalid(field, f"expected {count} integers, got {unreadable(found)}")
    found = found.to(torch.int64) if found.numel() == 0 and count == 0 else found
    if found.shape != (count,) or not _is_integer(found):
        raise invalid(field, f"expected {count} integers, got {shown(given)}")
    return found.to("cpu", torch.int64)
