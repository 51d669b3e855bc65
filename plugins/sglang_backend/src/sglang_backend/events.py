"""Streamed answers: each event of an SGLang server is a reply with the whole answer so far."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from corelm.errors import EngineError, InvalidRequestError
from corelm.spec import GenerateRequest, RowAnswer, StopStrings
from corelm_engine_kit import RowError, Streamed
from sglang_backend.capabilities import ServerInfo
from sglang_backend.protocol import AnswerStreams, limits, lists_of_answers, row_answer, whole_answer
from sglang_backend.weight_history import WeightsOfCall

#: How many characters of the server's own message an error repeats.
_MESSAGE_LENGTH = 300


def row_streams(request: GenerateRequest, info: ServerInfo, weights: WeightsOfCall) -> tuple[AnswerStreams, Streamed]:
    """Return what streams the rows of a request, and what the client does with their events."""
    streams, stops = _AnswerStreams(request, info), StopStrings.of_rows(request, info.tokenizer)
    most, lists = limits(request, info), lists_of_answers(request)

    def tell(row: int, reply: Any) -> None:
        # A reply that does not fit its request is left to `generation_result`, which says why.
        with suppress(RowError):
            ids, meta = reply["output_ids"], reply["meta_info"]
            if meta.get("finish_reason") is not None:
                streams.end(row, whole_answer(reply, False, request, most[row], stops[row], info, weights))
                return
            # The server may add a token to one of the lists before it sends the others.
            known = ids[: min(len(ids), *(len(meta.get(name) or []) for name in lists))] if lists else ids
            streams.reported[row] = meta

            def logprobs(first: int, end: int) -> Sequence[float]:
                return row_answer(
                    _part(meta, lists, first, end), known[first:end], None, "length", request, info
                ).logprobs

            streams.tell(row, known, logprobs)

    return streams, Streamed(_last_event, tell)


class _AnswerStreams(AnswerStreams):
    """Also knows the other ids of a row that is aborted."""

    def __init__(self, request: GenerateRequest, info: ServerInfo) -> None:
        super().__init__(request, info.tokenizer)
        self._request, self._info = request, info

    def aborted(self, row: int) -> RowAnswer:
        told = super().aborted(row)
        if not told.ids or not (self._request.return_support or self._request.top_logprobs):
            return told
        meta = _part(self.reported[row], lists_of_answers(self._request), 0, len(told.ids))
        return row_answer(meta, list(told.ids), None, "abort", self._request, self._info)


def _part(meta: Any, lists: Sequence[str], first: int, end: int) -> Any:
    """Return the ``meta_info`` of an event for some of its tokens."""
    return {**meta, **{name: meta[name][first:end] for name in lists}}


def _last_event(reply: Any, event: Any) -> Any:
    """Return an event, which replaces the earlier ones; see `Streamed`.

    Raises:
        InvalidRequestError: the event says that the server refused the request.
        EngineError: the event says that the request failed.
    """
    finish = event["meta_info"].get("finish_reason") or {}
    status = finish.get("status_code")
    if status is None:
        return event
    # Without streaming the server would send this status.
    said = f"the server reports status {status}: {str(finish.get('message'))[:_MESSAGE_LENGTH]}"
    raise InvalidRequestError(said) if status == 400 else EngineError(said)
