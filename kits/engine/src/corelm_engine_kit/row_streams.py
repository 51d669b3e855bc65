"""`RowStreams`: hands the tokens of rows to ``request.on_tokens``, for engines that report each row's answer so far.

`ReplyStreams` are those of a server whose replies come as events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from corelm.spec import GenerateRequest, RowAnswer, StopStrings, TokenChunk
from corelm_engine_kit.row_checks import RowError

#: Returns the log-probs of the tokens from number `first` to the one before number `end`.
LogProbs = Callable[[int, int], Sequence[float]]
#: Returns what is known of other ids at the first so many tokens: the fields `kept_ids`, `kept_log_mass` and `top` of a
#: `RowAnswer`, as far as they were asked for.
OtherIds = Callable[[int], Mapping[str, Any]]


class RowStreams:
    """Remembers what was handed over of each row, and hands over what is new.

    After a stop id or a stop string, it hands over nothing before `end`: an engine may notice the end of an answer a
    few tokens late, and the plugin then drops these tokens. After `end` it hands over nothing more: a server may send
    events after the last one of an answer, for example about usage.

    Args:
        request: the request; its `on_tokens` is not None.
        tokenizer: decodes the ids in which stop strings are searched.
    """

    def __init__(self, request: GenerateRequest, tokenizer: Any) -> None:
        assert request.on_tokens is not None
        self._on_tokens, self._stop_ids = request.on_tokens, request.stop_ids
        rows = len(request.prompts)
        self._watches = [stops.watch() for stops in StopStrings.of_rows(request, tokenizer)]
        self._over, self._ended = [False] * rows, [False] * rows
        self._told: list[tuple[list[int], list[float]]] = [([], []) for _ in range(rows)]
        self._others: dict[int, OtherIds] = {}

    def tell(self, row: int, ids: Sequence[int], logprobs: LogProbs, others: OtherIds | None = None) -> None:
        """Hand over the new tokens of a row that goes on.

        Args:
            row: the row.
            ids: all tokens of its answer so far.
            logprobs: returns the log-probs of some of them.
            others: returns what `aborted` needs besides, if the request asks for kept ids or the most probable ids.
        """
        if others is not None:
            self._others[row] = others
        start = end = len(self._told[row][0])
        while end < len(ids) and not self._over[row]:
            self._over[row] = self._watches[row].completed_by(ids[end]) or ids[end] in self._stop_ids
            end += 1
        if end > start:
            self._hand_over(row, ids[start:end], logprobs(start, end))

    def end(self, row: int, answer: RowAnswer) -> None:
        """Hand over what is missing of a row's answer. Further calls for the same row do nothing."""
        if self._ended[row]:
            return
        self._ended[row] = self._over[row] = True
        start = len(self._told[row][0])
        self._hand_over(row, answer.ids[start:], answer.logprobs[start:], answer.finish_reason)

    def aborted(self, row: int) -> RowAnswer:
        """Return the answer of a row whose request was aborted and returned nothing: what was handed over.

        Raises:
            Exception: the errors of the `others` that `tell` got last; `row_outcome` makes them errors of the row.
        """
        ids, logprobs = self._told[row]
        others = self._others.get(row)
        return RowAnswer(ids, logprobs, "abort", **(others(len(ids)) if others and ids else {}))

    def _hand_over(self, row: int, ids: Sequence[int], logprobs: Sequence[float], reason: str | None = None) -> None:
        known_ids, known_logprobs = self._told[row]
        known_ids += ids
        known_logprobs += logprobs
        self._on_tokens(TokenChunk(row=row, ids=ids, logprobs=logprobs, finish_reason=reason))


@dataclass(frozen=True, slots=True)
class SoFar:
    """What the reply to a row that goes on says so far.

    Attributes:
        ids: all tokens of the answer so far.
        logprobs: returns the log-probs of some of them.
        others: see `RowStreams.tell`.
    """

    ids: Sequence[int]
    logprobs: LogProbs
    others: OtherIds | None = None


class ReplyStreams(RowStreams):
    """Streams of rows whose replies come as events, for `HttpEngine.map_rows`. A plugin says how to read a reply."""

    def joined(self, reply: Any, event: Any) -> Any:
        """Return the reply so far from the reply before the event, None at first; see `Streamed`."""
        raise NotImplementedError

    def read(self, row: int, reply: Any) -> RowAnswer | SoFar | None:
        """Return the answer in a reply that has ended, what one that goes on says so far, or None to wait for more."""
        raise NotImplementedError

    def take(self, row: int, reply: Any) -> None:
        """Hand over what is new in the reply to a row so far."""
        # What is wrong with a reply is said when it is parsed as a whole.
        with suppress(RowError):
            found = self.read(row, reply)
            if isinstance(found, SoFar):
                self.tell(row, found.ids, found.logprobs, found.others)
            elif found is not None:
                self.end(row, found)
