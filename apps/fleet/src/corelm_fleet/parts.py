"""Requests for some rows of a call, and one result of the results for all its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from corelm import Ragged, TokenSets
from corelm.errors import EngineError
from corelm.spec import (
    GenerateRequest,
    GenerateResult,
    RowAnswer,
    RowFailure,
    ScoreRequest,
    ScoreResult,
    TokenChunk,
    generate_result,
    score_result,
)

Rows = TypeVar("Rows", Ragged, TokenSets)
Request = GenerateRequest | ScoreRequest
Result = GenerateResult | ScoreResult


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a result.

    Attributes:
        result: what an engine returned.
        index: the rows of it that count.
        rows: the rows of the whole call that these are.
    """

    result: Result
    index: Sequence[int]
    rows: Sequence[int]


def rows_of(request: Request) -> Ragged:
    """Return the prompts of a request for answers, or the sequences of one for scores."""
    return request.prompts if isinstance(request, GenerateRequest) else request.sequences


def request_of_rows(
    request: Request,
    rows: Sequence[int],
    names: Sequence[str],
    timeout: float | None,
    on_tokens: Callable[[TokenChunk], None] | None,
) -> Request:
    """Return the request for some rows of a call. Each keeps its seed.

    Args:
        request: the request of the whole call.
        rows: the rows.
        names: one name per row, for `abort`.
        timeout: seconds for these rows.
        on_tokens: takes the chunks of these rows; None if the caller does not read along.
    """
    if list(rows) == list(range(len(rows_of(request)))):
        mine: dict[str, Any] = {"on_tokens": on_tokens} if isinstance(request, GenerateRequest) else {}
        return replace(request, request_ids=tuple(names), timeout=timeout, **mine)
    index = torch.tensor(rows)
    if isinstance(request, ScoreRequest):
        return replace(
            request,
            sequences=request.sequences.select(index),
            score_from=request.score_from[index],
            request_ids=tuple(names),
            timeout=timeout,
            support=None if request.support is None else request.support.select(index),
            top_ids=None if request.top_ids is None else request.top_ids.select(index),
        )
    told = request.on_answer
    return replace(
        request,
        prompts=request.prompts.select(index),
        seeds=None if request.seeds is None else request.seeds[index],
        request_ids=tuple(names),
        timeout=timeout,
        on_tokens=on_tokens,
        on_answer=None if told is None else lambda row, tokens: told(rows[row], tokens),
    )


def result_of_parts(
    request: Request, parts: Sequence[Part], failures: Mapping[int, RowFailure | RowAnswer], label: str
) -> Result:
    """Return the result of a call.

    Args:
        request: the request of the whole call.
        parts: the rows that engines have answered.
        failures: the other rows: why they failed, or what there is of an answer that was aborted.
        label: the label of the weights, for rows of engines that do not say which weights a row came from.

    Raises:
        EngineError: the engines returned log-probs of different distributions, or texts and none.
    """
    if len({getattr(part.result, "texts", None) is None for part in parts}) > 1:
        raise EngineError("some engines of the fleet return texts and some do not", usable=True)
    # Rows without an answer have no distribution.
    labelled = [part.result for part in parts if part.rows]
    if failures or not parts:
        parts = [*parts, Part(_made(request, failures), range(len(failures)), list(failures))]
    rows = [row for part in parts for row in part.rows]
    # None if the rows are in order already, as those of a call that one engine has answered alone.
    order = None if rows == list(range(len(rows))) else torch.tensor(rows, dtype=torch.int64).argsort()
    results = [part.result for part in parts]
    values: dict[str, Any] = {}
    for each in fields(results[0]):
        given = [getattr(part.result, each.name) for part in parts]
        if any(isinstance(value, (Ragged, TokenSets)) for value in given):
            # What one engine has not returned was not asked for: another one has returned more.
            asked = all(getattr(result, each.name) is not None for result in labelled)
            values[each.name] = _ragged(each.name, request, parts, given, order) if asked else None
        elif any(isinstance(value, (tuple, list)) for value in given):
            filled = [value or _filler(each.name, part.result, label) for part, value in zip(parts, given, strict=True)]
            flat = [value[at] for part, value in zip(parts, filled, strict=True) for at in part.index]
            values[each.name] = tuple(flat if order is None else (flat[place] for place in order.tolist()))
        else:
            values[each.name] = _common(each.name, [getattr(result, each.name) for result in labelled] or given)
    return replace(results[0], **values)


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


def _made(request: Request, failures: Mapping[int, RowFailure | RowAnswer]) -> Result:
    """Return a result for rows that no engine has answered."""
    if isinstance(request, GenerateRequest):
        return generate_result(request, list(failures.values()))
    index = torch.tensor(list(failures), dtype=torch.int64)
    some = replace(request, sequences=request.sequences.select(index), score_from=request.score_from[index])
    told = {at: each for at, each in enumerate(failures.values()) if isinstance(each, RowFailure)}
    return score_result(some, told)


def _ragged(name: str, request: Request, parts: Sequence[Part], given: Sequence[Any], order: Tensor | None) -> Any:
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
    raise EngineError(f"the engines of the fleet returned different values of {name}: {found}", usable=True)
