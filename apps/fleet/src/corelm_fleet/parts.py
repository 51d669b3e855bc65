"""Requests for some rows of a call, and one result of the results for all its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from corelm import Ragged
from corelm.spec import (
    GenerateRequest,
    RowAnswer,
    RowFailure,
    ScoreRequest,
    TokenChunk,
    generate_result,
    score_result,
)
from corelm_engine_kit.joining import Part, Result, joined

Request = GenerateRequest | ScoreRequest


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
    """Return the request for some rows of a call, with a name for each. Each keeps its seed."""
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
    return replace(
        request,
        prompts=request.prompts.select(index),
        seeds=None if request.seeds is None else request.seeds[index],
        request_ids=tuple(names),
        timeout=timeout,
        on_tokens=on_tokens,
    )


def result_of_parts(
    request: Request, parts: Sequence[Part], failures: Mapping[int, RowFailure | RowAnswer], label: str
) -> Result:
    """Return the result of a call.

    Args:
        parts: the rows that engines have answered.
        failures: the other rows: why they failed, or what there is of an answer that was aborted.
        label: the label of the weights, for rows of engines that do not say which weights a row came from.

    Raises:
        EngineError: the engines returned log-probs of different distributions, or texts and none.
    """
    if failures or not parts:
        made = _made(request, failures)
        parts = [*parts, Part(made, range(len(failures)), list(failures), failed=True)]
    return joined(parts, label)


def _made(request: Request, failures: Mapping[int, RowFailure | RowAnswer]) -> Result:
    """Return a result for rows that no engine has answered."""
    if isinstance(request, GenerateRequest):
        return generate_result(request, list(failures.values()))
    index = torch.tensor(list(failures), dtype=torch.int64)
    some = replace(request, sequences=request.sequences.select(index), score_from=request.score_from[index])
    told = {at: each for at, each in enumerate(failures.values()) if isinstance(each, RowFailure)}
    return score_result(some, told)
