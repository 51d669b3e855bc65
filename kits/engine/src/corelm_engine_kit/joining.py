"""One result of the rows of several results: of the engines of a fleet, or of recorded calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from corelm import Ragged, TokenSets
from corelm.errors import EngineError
from corelm.spec import GenerateResult, ScoreResult

Rows = TypeVar("Rows", Ragged, TokenSets)
Result = GenerateResult | ScoreResult


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a result.

    Attributes:
        result: what an engine returned.
        index: the rows of it that count.
        rows: the rows of the whole call that these are.
        failed: whether none of them has an answer.
    """

    result: Result
    index: Sequence[int]
    rows: Sequence[int]
    failed: bool = False


def joined(parts: Sequence[Part], label: str) -> Result:
    """Return one result of parts, whose rows are those of the whole call.

    Args:
        parts: one or more.
        label: the label of the weights, for rows of a result that does not say which weights they came from.

    Raises:
        EngineError: the parts have log-probs of different distributions, or texts and none.
    """
    # Rows without an answer have no distribution.
    answered = [part for part in parts if not part.failed and part.rows]
    if len({getattr(part.result, "texts", None) is None for part in answered}) > 1:
        raise EngineError("some of the results that belong together have texts and some do not", usable=True)
    rows = [row for part in parts for row in part.rows]
    # None if the rows are in order already, as those of a call that one engine has answered alone.
    order = None if rows == list(range(len(rows))) else torch.tensor(rows, dtype=torch.int64).argsort()
    values: dict[str, Any] = {}
    for each in fields(parts[0].result):
        given = [getattr(part.result, each.name) for part in parts]
        if any(isinstance(value, (Ragged, TokenSets)) for value in given):
            # What one engine has not returned was not asked for: another one has returned more.
            asked = all(getattr(part.result, each.name) is not None for part in answered)
            values[each.name] = _ragged(parts, given, order) if asked else None
        elif any(isinstance(value, (tuple, list)) for value in given):
            pairs = zip(parts, given, strict=True)
            filled = [value or _filler(each.name, part.result, label) for part, value in pairs]
            flat = [value[at] for part, value in zip(parts, filled, strict=True) for at in part.index]
            values[each.name] = tuple(flat if order is None else (flat[place] for place in order.tolist()))
        else:
            found = [getattr(part.result, each.name) for part in answered]
            values[each.name] = _common(each.name, found or given)
    return replace(parts[0].result, **values)


def _filler(name: str, result: Result, label: str) -> Sequence[Any]:
    """Return what a field with one value per row says of a result that leaves it out."""
    versions = result.weight_versions or (label,) * len(rows_of_result(result))
    if name == "version_runs":
        return [((version, 0),) for version in versions]
    if name == "cached_tokens":
        return (None,) * len(versions)
    return versions if name == "weight_versions" else ("",) * len(versions)


def rows_of_result(result: Result) -> Ragged:
    """Return a field of a result that has all its rows."""
    return result.ids if isinstance(result, GenerateResult) else result.logprobs


def _ragged(parts: Sequence[Part], given: Sequence[Any], order: Tensor | None) -> Any:
    if any(isinstance(value, TokenSets) for value in given):
        return _sets(parts, given, order)
    some = next(value for value in given if isinstance(value, Ragged))
    chosen = []
    for part, value in zip(parts, given, strict=True):
        if value is None:
            # Rows that failed have no logits, and nothing of them was scored.
            lengths = rows_of_result(part.result).lengths
            value = Ragged(some.values.new_zeros((int(lengths.sum()), *some.values.shape[1:])), lengths)
        chosen.append(_chosen(value, part))
    if len({value.values.device for value in chosen}) > 1:
        # The caller has not said where the results go, and each engine has chosen.
        chosen = [value.to("cpu") for value in chosen]
    if len({value.values.dtype for value in chosen}) > 1:
        chosen = [value.with_values(value.values.float()) for value in chosen]
    joined = chosen[0] if len(chosen) == 1 else Ragged.cat(chosen)
    return joined if order is None else joined.select(order)


def _sets(parts: Sequence[Part], given: Sequence[Any], order: Tensor | None) -> TokenSets:
    # Rows that failed were drawn from no sets.
    found = [
        TokenSets.empty(rows_of_result(part.result).lengths) if value is None else value
        for part, value in zip(parts, given, strict=True)
    ]
    chosen = [_chosen(value, part) for part, value in zip(parts, found, strict=True)]
    if len({value.ids.values.device for value in chosen}) > 1:
        chosen = [value.to("cpu") for value in chosen]
    joined = TokenSets.cat(chosen)
    return joined if order is None else joined.select(order)


def _chosen(value: Rows, part: Part) -> Rows:
    """Return the rows that count. Core copies them later, so all of them are not copied here."""
    index = list(part.index)
    return value if index == list(range(len(value))) else value.select(index)


def _common(name: str, given: Sequence[Any]) -> Any:
    found = list(dict.fromkeys(given))
    if len(found) == 1:
        return found[0]
    if name == "support":
        return "truncated"
    raise EngineError(f"the results that belong together have different values of {name}: {found}", usable=True)
