"""Merge many requests into one call to the engine, and take its result apart again. Sharing changes no answer.

The result is checked as a whole. If it is wrong, the call has failed, and the dispatcher finds the request at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from corelm.backend.engine import PreparedCall
from corelm.backend.engine_call import Call, Origin
from corelm.errors import CoreLMError, EngineError, own
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult, TokenChunk, fields_of_rows
from corelm.spec.sampling import SamplingParams
from corelm.tensors.modes import CallerModes
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets

Result = GenerateResult | ScoreResult | Exception


def sharing_key(call: PreparedCall[Any], modes: CallerModes) -> Hashable | None:
    """Return a key that is equal for requests that may share a call, or None for a request that has to go alone.

    Autocast and the like change an engine's numbers, so requests that were made under different torch modes go apart.
    Seeds are given per answer, so they may differ, but answers with and without a seed go apart. Gradients and logits
    belong to one caller. A request has one adapter for all its rows. Only the engine knows what `engine_kwargs` mean
    and whether two of them are the same, so requests with `engine_kwargs` go alone.
    """
    request = call.request
    if call.on_caller_thread:
        return None
    if isinstance(request, ScoreRequest):
        named = None if request.top_ids is None else request.top_ids.values.shape[1]
        more = (request.return_argmax, request.support is not None, request.top_k, named)
        return ("score", modes.key, request.temperature, request.device, more, request.adapter)
    if request.sampling.engine_kwargs:
        return None
    sampling = _unseeded(request.sampling)
    seeded = request.seeds is not None
    asked = (request.logprobs, request.return_support, request.top_logprobs)
    return ("generate", modes.key, sampling, asked, request.stop_ids, seeded, request.adapter)


class SharedCall(Call):
    """One call for many."""

    def __init__(self, calls: Sequence[PreparedCall[Any]]) -> None:
        request = replace(_joined([call.request for call in calls]), timeout=None)
        super().__init__(calls[0].hook, request)
        self._calls, self.callers = calls, len(calls)
        self.deliveries = [each for call in calls for each in call.deliveries]

    @property
    def origins(self) -> list[Origin]:
        return [origin for call in self._calls for origin in call.origins]

    def finish(self, result: Any) -> list[Result]:
        parts = _parts(result, [call.rows for call in self._calls])
        return [_finished(call, part) for call, part in zip(self._calls, parts, strict=True)]

    def failed(self, error: CoreLMError) -> CoreLMError:
        """Return the error without row numbers: those of a shared call are not the rows of any one caller."""
        if not getattr(error, "problems", None):
            return error
        made = own(error)
        made.__dict__["problems"] = {}
        return made


def _unseeded(sampling: SamplingParams) -> SamplingParams:
    return sampling if sampling.seed is None else replace(sampling, seed=None)


def _joined(requests: Sequence[Any]) -> GenerateRequest | ScoreRequest:
    first = requests[0]
    names = tuple(name for request in requests for name in request.request_ids)
    if len({*names}) != len(names):
        # The dispatcher then sends the requests one after another.
        raise EngineError("two requests use the same name in request_ids", usable=True)
    joined: dict[str, Any] = {"request_ids": names}
    for each in fields(first):
        values = [getattr(request, each.name) for request in requests]
        if isinstance(values[0], (Ragged, TokenSets)):
            joined[each.name] = values[0].cat(values)
        elif isinstance(values[0], torch.Tensor):
            joined[each.name] = torch.cat(values)
    if isinstance(first, GenerateRequest):
        joined |= {"on_tokens": _shared_listener(requests), "sampling": _unseeded(first.sampling)}
    return replace(first, **joined)


def _shared_listener(requests: Sequence[GenerateRequest]) -> Callable[[TokenChunk], None] | None:
    """Return a function that takes the chunks of the joined request and hands each to the request of its row."""
    # By number: in a list, the row -1 would be another caller's.
    rows = [(request, row) for request in requests for row in range(len(request.prompts))]
    owners = dict(enumerate(rows))

    def deliver(chunk: TokenChunk) -> None:
        request, row = owners[chunk.row]
        if request.on_tokens is not None:
            request.on_tokens(replace(chunk, row=row))

    return deliver if any(request.on_tokens for request in requests) else None


def _finished(call: PreparedCall[Any], part: Any) -> Result:
    try:
        result: Result = call.finish(part)
        return result
    except Exception as error:
        # An error of this request's own rows is this request's alone.
        return error


def _parts(batch: Any, rows: Sequence[int]) -> list[GenerateResult | ScoreResult]:
    """Split a result into results of so many rows each, which share no storage."""
    ends = list(accumulate(rows, initial=0))

    def parted(found: Any) -> Sequence[Any]:
        if isinstance(found, (Ragged, TokenSets)):
            return found.chunks(rows)
        return [tuple(found[start:end]) for start, end in pairwise(ends)]

    named = {name: parted(found) for name, found in fields_of_rows(batch).items()}
    return [replace(batch, **{name: values[part] for name, values in named.items()}) for part in range(len(rows))]
