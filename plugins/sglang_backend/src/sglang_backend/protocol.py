"""The payloads that SGLang's ``/generate`` is sent, and its replies, parsed and checked against the request.

Every row is a request with its own seed, and fails alone: functions that read a reply raise `RowError` where it is not
the answer to its request. Nothing here talks to the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any

from corelm.errors import EngineError, InvalidRequestError
from corelm.spec import (
    GenerateRequest,
    RowAnswer,
    RowFailure,
    RowScores,
    ScoreRequest,
    StopStrings,
    VersionRuns,
)
from corelm_engine_kit import (
    Payload,
    ReplyStreams,
    RowError,
    SoFar,
    answer_end,
    checked_finish_reason,
    checked_ids,
    checked_logprobs,
    prompts_and_limits,
)
from sglang_backend.candidates import argmax_of, candidate_fields, top_ids_of
from sglang_backend.capabilities import ServerInfo
from sglang_backend.kept import KeptIds, kept_fields, kept_ids, top_k_of, wants_truncated
from sglang_backend.sampling import parameters, safe_stops
from sglang_backend.weight_history import WeightsOfCall, check_labels

GENERATE = "/generate"
#: What the server reports as the matched stop if the logits were NaN. The id that it returns then is made up.
NAN = "NaN happened"
#: How many characters of the server's own message an error repeats.
_MESSAGE_LENGTH = 300
#: The parts of an entry ``[logprob, id, text]``.
_LOGPROB, _ID = itemgetter(0), itemgetter(1)


# Generating -----------------------------------------------------------------------------------------------------------


def generation_requests(request: GenerateRequest, info: ServerInfo) -> list[Payload]:
    """Return one payload per prompt. Parameters that SGLang would change are refused; see `sampling.parameters`."""
    capabilities = info.capabilities
    stop = safe_stops(request.sampling, info.tokenizer)
    top_k = None
    if request.return_support:
        top_k = top_k_of(request.sampling, info.support_limit, capabilities.vocab_size)
    streamed = request.on_tokens is not None
    details: Payload = {"return_logprob": request.logprobs != "none" or request.return_support, **kept_fields(request)}
    if request.top_logprobs and not wants_truncated(request):
        details |= candidate_fields("output", request.top_logprobs, streamed=streamed)
    return [
        {
            "input_ids": ids,
            "sampling_params": parameters(
                request.sampling,
                max_new_tokens=limit,
                seed=seed,
                stop_ids=request.stop_ids,
                eos_token_ids=capabilities.eos_token_ids or frozenset(),
                vocab_size=capabilities.vocab_size,
                stop=stop,
                top_k=top_k,
            ),
            **details,
            **({"stream": True} if streamed else {}),
        }
        for ids, limit, seed in prompts_and_limits(request, capabilities.max_context)
    ]


def lists_of_answers(request: GenerateRequest) -> tuple[str, ...]:
    """Return the fields of ``meta_info`` that have an entry for each token of the answer."""
    names = ["output_token_logprobs"] if request.logprobs != "none" or request.return_support else []
    if request.return_support:
        names += ["output_token_sampling_mask", "output_token_sampling_logprobs"]
    if request.top_logprobs and not wants_truncated(request):
        names.append("output_top_logprobs")
    return tuple(names)


class AnswerStreams(ReplyStreams):
    """The streams of a call. Each event of a server is a reply with the whole answer so far.

    Args:
        parse: ``parse(row, reply, aborted)`` returns the answer in a whole reply.
        runs: gets the `version_runs` of rows that are aborted without a reply.
    """

    def __init__(
        self,
        request: GenerateRequest,
        info: ServerInfo,
        parse: Callable[[int, Any, bool], RowAnswer],
        weights: WeightsOfCall,
        runs: list[VersionRuns],
    ) -> None:
        super().__init__(request, info.tokenizer)
        self._request, self._info, self._parse, self._weights, self._runs = request, info, parse, weights, runs
        self._lists = lists_of_answers(request)
        # Of an aborted row, the server says no more than what it has reported last.
        self._reported: dict[int, Any] = {}

    def joined(self, reply: Any, event: Any) -> Any:
        """Return an event, which replaces the earlier ones, unless it says that the request was refused or failed."""
        finish = event["meta_info"].get("finish_reason") or {}
        status = finish.get("status_code")
        if status is None:
            return event
        # Without streaming the server would send this status.
        said = f"the server reports status {status}: {str(finish.get('message'))[:_MESSAGE_LENGTH]}"
        raise InvalidRequestError(said) if status == 400 else EngineError(said)

    def read(self, row: int, reply: Any) -> RowAnswer | SoFar:
        ids, meta = reply["output_ids"], reply["meta_info"]
        if meta.get("finish_reason") is not None:
            return self._parse(row, reply, False)
        # The server may add a token to one of the lists before it sends the others.
        known = ids[: min(len(ids), *(len(meta.get(name) or []) for name in self._lists))] if self._lists else ids
        self._reported[row] = meta

        def part(first: int, end: int) -> RowAnswer:
            some = {**meta, **{name: meta[name][first:end] for name in self._lists}}
            return row_answer(some, known[first:end], None, "abort", self._request, self._info)

        def others(count: int) -> dict[str, Any]:
            answer = part(0, count)
            return {"kept_ids": answer.kept_ids, "kept_log_mass": answer.kept_log_mass, "top": answer.top}

        wanted = self._request.return_support or self._request.top_logprobs
        return SoFar(known, lambda first, end: part(first, end).logprobs, others if wanted else None)

    def aborted(self, row: int) -> RowAnswer:
        answer = super().aborted(row)
        if answer.ids:
            self._runs[row] = self._weights.runs(self._reported[row], len(answer.ids))
        return answer


# Scoring --------------------------------------------------------------------------------------------------------------


def scoring_requests(request: ScoreRequest) -> list[Payload]:
    """Return one payload per sequence. It asks for log-probs from ``score_from[r]`` on, and samples nothing."""
    k = max(request.top_k, int(request.return_argmax))
    return [
        {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": _logprob_start(ids, start),
            **(candidate_fields("input", k) if k else {}),
        }
        for ids, start in zip(request.sequences.tolist(), request.score_from.tolist(), strict=True)
    ]


def _logprob_start(ids: Sequence[int], start: int) -> int:
    """Return the position to ask from: the one before `start`, since SGLang returns None for the first position."""
    return max(0, min(start, len(ids)) - 1)


# Replies --------------------------------------------------------------------------------------------------------------


def is_reply_to(payload: Payload, reply: Any) -> bool:
    """Return whether a reply names the request with `payload`. One without ``meta_info`` is left to the parser."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    return not isinstance(meta, dict) or meta.get("id") == payload["rid"]


def is_duplicate(entry: Any) -> bool:
    """Return whether the server refused a request because it still runs an earlier one with the same id.

    This happens after a connection broke: the client repeats the request before the server notices the break.
    """
    return isinstance(entry, InvalidRequestError) and "Duplicate request ID" in str(entry)


def whole_answer(
    reply: Any, aborted: bool, request: GenerateRequest, limit: int, stops: StopStrings, info: ServerInfo
) -> RowAnswer:
    """Return the answer in a reply."""
    meta = reply["meta_info"]
    reason = _finish_reason(meta)
    ids = checked_ids(reply["output_ids"], vocab_size=info.capabilities.vocab_size, limit=limit)
    # The server misses some stops that core promises. It looks for stop strings in a few tokens only, as many as it
    # would write the string in itself. It looks for none that `safe_stops` leaves out, and for no stop id where
    # `parameters` had to switch that off.
    end = answer_end(ids, request.stop_ids, stops)
    least, ended = min(request.sampling.min_new_tokens, limit), end is not None
    last = ids[-1] if ids else None
    reason = checked_finish_reason(reason, len(ids), limit=limit, least=least, ended=ended, aborted=aborted, last=last)
    answer = row_answer(meta, ids, end, "stop" if ended else reason, request, info)
    return replace(answer, cached_tokens=meta.get("cached_tokens"))


def row_answer(
    meta: Any, ids: list[int], end: int | None, reason: str, request: GenerateRequest, info: ServerInfo
) -> RowAnswer:
    """Return an answer of the first `end` ids, None for all, with its log-probs and what was asked for of other ids."""
    if not ids or not lists_of_answers(request):
        return RowAnswer(ids[:end], [], reason)
    size, name = info.capabilities.vocab_size, "output_token_logprobs"
    full = checked_logprobs(_echoed(meta.get(name) or [], ids, size, name), len(ids))[:end]
    ids = ids[:end]
    kept = KeptIds()
    if request.return_support:
        kept = kept_ids(meta, ids, full, request, limit=info.support_limit, vocab_size=size)
    top = kept.top
    if request.top_logprobs and top is None:
        top = top_ids_of(meta, "output", len(ids), request.top_logprobs, size)
    logprobs = kept.logprobs if wants_truncated(request) else full
    return RowAnswer(ids, [] if request.logprobs == "none" else logprobs, reason, kept.ids, kept.log_mass, top)


def row_scores(
    reply: Any, row: list[int], start: int, request: ScoreRequest, info: ServerInfo
) -> RowScores | RowFailure:
    """Return the scores in a reply, of the part of the row that was asked for, without its first id."""
    meta, ids = reply["meta_info"], row[_logprob_start(row, start) :]
    if _finish_reason(meta) == "abort":
        return RowFailure("the request was aborted", aborted=True)
    check_labels(meta, [info.weight_label])
    size, name = info.capabilities.vocab_size, "input_token_logprobs"
    k = max(request.top_k, int(request.return_argmax))
    logprobs = checked_logprobs(_echoed(meta[name], ids, size, name, without=1), len(ids) - 1)
    argmax = argmax_of(meta, ids[1:], logprobs, k, size) if request.return_argmax else ()
    top = top_ids_of(meta, "input", len(logprobs), k, size) if request.top_k else None
    return RowScores(logprobs, argmax, top)


def _finish_reason(meta: Any) -> str:
    finish = meta["finish_reason"]
    if finish.get("matched") == NAN:
        raise RowError(f"the model's logits were NaN (SGLang: {NAN!r})")
    return str(finish["type"])


def _echoed(reported: Any, ids: list[int], vocab_size: int, name: str, without: int = 0) -> Sequence[Any]:
    """Return the log-probs of ``[logprob, id, text]`` entries about exactly these ids. The first `without` lack one."""
    if len(reported) != len(ids):
        raise RowError(f"{name} has {len(reported)} entries for {len(ids)} tokens")
    same = False
    with suppress(IndexError, KeyError, TypeError):
        same = [*map(_ID, reported)] == ids
    # An entry may be another one. Find out which.
    for position, ((_, echoed, *_), token) in enumerate([] if same else zip(reported, ids, strict=True)):
        # SGLang echoes the last id of the vocabulary in a prompt as 0; its log-prob is right.
        if echoed != token and not (echoed == 0 and token == vocab_size - 1):
            raise RowError(f"{name} is about id {echoed} at position {position}, expected {token}")
    if without and reported[0][0] is not None:
        raise RowError(
            f"{name} starts with a number and not with None; this version of SGLang counts positions differently"
        )
    return [*map(_LOGPROB, reported[without:])]
