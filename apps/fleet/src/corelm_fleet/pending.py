"""`PendingCall`: one request to a fleet, and what has been answered of it."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from corelm import Ragged
from corelm.errors import own
from corelm.spec import (
    GenerateRequest,
    GenerateResult,
    RowAnswer,
    RowFailure,
    ScoreRequest,
    TokenChunk,
    generate_result,
    score_result,
)
from corelm.tensors.modes import CallerModes
from corelm.waiting import next_item
from corelm_engine_kit.joining import Part, Result, joined
from corelm_fleet.routing import Group

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


T = TypeVar("T")

#: Requests whose prompts begin with the same tokens, this many, are sent to the same replica if it has room.
_KEY = 64


@dataclass(slots=True)
class Told:
    """What the caller was handed of one answer while it was sampled.

    Attributes:
        dispatches: how often the row was sent to a replica.
        ended: nothing more is handed over.
        strayed: a later sampling of the row gave other tokens than those handed over.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    dispatches: int = 0
    ended: bool = False
    strayed: bool = False


class PendingCall:
    """A request whose rows are being answered. The fleet holds its lock around everything but `wait` and `teller`.

    Attributes:
        rows: how many rows it has.
        first: the fleet's number of its first row. The others follow.
        left: whether its caller has stopped waiting.
        end: when its timeout passes, in the seconds of `time.monotonic`; None without a timeout.
        aborted: rows that were aborted.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.rows = len(rows_of(request))
        self.first, self.left = 0, False
        self.end = None if request.timeout is None else time.monotonic() + request.timeout
        self.aborted: set[int] = set()
        self._open = dict.fromkeys(range(self.rows))
        self._parts: list[Part] = []
        self._failures: dict[int, RowFailure | RowAnswer] = {}
        self._error: Exception | None = None
        self._done: SimpleQueue[None] = SimpleQueue()
        self._modes, self._context = CallerModes(), contextvars.copy_context()
        self._on_tokens = request.on_tokens if isinstance(request, GenerateRequest) else None
        self._told = [Told() for _ in range(self.rows)] if self._on_tokens is not None else []
        self._telling = threading.RLock()
        self._settled()

    # For the caller ---------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until every row is settled.

        Raises:
            TimeoutError: the timeout of the request passed.
        """
        try:
            next_item(self._done, self.request.timeout)
        except Empty:
            raise TimeoutError("no answer within the timeout") from None

    def result(self, label: str) -> Result:
        """Return the result, once every row is settled.

        Args:
            label: the label of the weights, for rows that do not say which weights they came from.

        Raises:
            CoreLMError: the call failed as a whole.
        """
        if self._error is not None:
            raise own(self._error)
        parts = [self._kept(part) for part in self._parts]
        return result_of_parts(self.request, parts, self._failures, label)

    # Rows -------------------------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> range:
        """The fleet's numbers of the rows."""
        return range(self.first, self.first + self.rows)

    def groups(self, rows: Sequence[int]) -> list[Group]:
        """Return rows for routing. Samples of one prompt are in one group; numbers are the fleet's."""
        prompts = rows_of(self.request).select(list(rows)).tolist()
        if not isinstance(self.request, GenerateRequest):
            return [
                Group(rows=(self.first + row,), prompt=len(ids), new=0.0, key=_key(ids))
                for row, ids in zip(rows, prompts, strict=True)
            ]
        alike: dict[tuple[int, ...], list[int]] = {}
        for row, ids in zip(rows, prompts, strict=True):
            alike.setdefault(tuple(ids), []).append(self.first + row)
        new = float(self.request.sampling.max_new_tokens or 512)
        return [Group(rows=tuple(same), prompt=len(ids), new=new, key=_key(ids)) for ids, same in alike.items()]

    def take(self, result: Result, index: Sequence[int], rows: Sequence[int]) -> None:
        """Keep what an engine returned for rows: the rows `index` of its result."""
        self._parts.append(Part(result, list(index), list(rows)))
        self._settled(rows)

    def fail(self, row: int, why: str) -> None:
        """Fail one row; the others are served."""
        self._failures[row] = RowFailure(why)
        self._settled([row])

    def fail_all(self, error: Exception) -> None:
        """Fail the whole call."""
        self._error = self._error or error
        self._settled(list(self._open))

    def leave_out(self, row: int) -> bool:
        """Settle a row that must not be sent, and return whether it was one.

        A row that was aborted while it waited ends with the tokens that its caller has been handed. A row that would be
        sampled differently the next time cannot be sent again once its caller has tokens of it.
        """
        told = self._told[row] if self._told else Told()
        if row in self.aborted:
            self._failures[row] = self._aborted(told)
            self._settled([row])
        elif told.ids and not self._repeatable:
            self.fail(
                row,
                f"a replica was lost after {len(told.ids)} tokens of this answer had been handed over, and without a "
                "seed another replica would sample another answer",
            )
        else:
            return False
        return True

    # For dispatches ---------------------------------------------------------------------------------------------------

    def seconds_left(self) -> float | None:
        """Return how many seconds of the timeout are left; None without a timeout."""
        return None if self.end is None else self.end - time.monotonic()

    def in_modes(self, function: Callable[[], T]) -> T:
        """Return what the function returns, called with the context variables and torch modes of the caller."""

        def run() -> T:
            with self._modes:
                return function()

        return self._context.copy().run(run)

    def teller(self, rows: Sequence[int], producing: Callable[[], object]) -> Callable[[TokenChunk], None] | None:
        """Return what takes the chunks of a dispatch with these rows; None if the caller does not read along.

        A row that was in flight before begins again: what its caller has been handed is not handed over twice.
        `producing` is called at the first chunk.
        """
        on_tokens = self._on_tokens
        if on_tokens is None:
            return None
        seen = [0] * len(rows)
        began = False
        for row in rows:
            self._told[row].dispatches += 1

        def tell(chunk: TokenChunk) -> None:
            nonlocal began
            if not began:
                began = True
                producing()
            at = getattr(chunk, "row", None)
            if not isinstance(chunk, TokenChunk) or type(at) is not int or not 0 <= at < len(rows):
                # Core says what is wrong with it.
                on_tokens(replace(chunk, row=-1) if isinstance(chunk, TokenChunk) else chunk)
                return
            with self._telling:
                told, start, ids = self._told[rows[at]], seen[at], list(chunk.ids)
                seen[at] += len(ids)
                known = min(max(0, len(told.ids) - start), len(ids))
                told.strayed |= ids[:known] != told.ids[start : start + known]
                if told.ended or told.strayed or not (ids[known:] or chunk.finish_reason):
                    return
                logprobs = list(chunk.logprobs)[known:]
                told.ids += ids[known:]
                told.logprobs += logprobs
                told.ended = chunk.finish_reason is not None
                on_tokens(replace(chunk, row=rows[at], ids=ids[known:], logprobs=logprobs))

        return tell

    # Inside -----------------------------------------------------------------------------------------------------------

    @property
    def _repeatable(self) -> bool:
        """Whether a row that is sampled again gets the same answer."""
        request = self.request
        return isinstance(request, GenerateRequest) and (request.seeds is not None or request.sampling.greedy)

    def _aborted(self, told: Told) -> RowAnswer | RowFailure:
        """Return what there is of a row that was aborted while it waited."""
        request = self.request
        if not isinstance(request, GenerateRequest):
            return RowFailure("it was aborted", aborted=True)
        if told.ids and (request.return_support or request.top_logprobs):
            # The replica that was lost took with it what no chunk carries.
            return RowFailure(
                f"it was aborted after a replica was lost, and of the {len(told.ids)} tokens that had been handed over "
                "the other ids are not known"
            )
        return RowAnswer(list(told.ids), list(told.logprobs), "abort")

    def _settled(self, rows: Sequence[int] = ()) -> None:
        for row in rows:
            self._open.pop(row, None)
            if self._told:
                with self._telling:
                    self._told[row].ended = True
        if not self._open:
            self._done.put(None)

    def _kept(self, part: Part) -> Part:
        """Return a part that begins with the log-probs that were handed over.

        Rows that were sampled again may have log-probs that differ in the last bit, because other rows shared the call.
        """
        again = [row for row in part.rows if self._told and self._told[row].dispatches > 1 and self._told[row].ids]
        result = part.result
        if not again or not isinstance(result, GenerateResult):
            return part
        ids, logprobs = result.ids.tolist(), None if result.logprobs is None else result.logprobs.tolist()
        for at, row in zip(part.index, part.rows, strict=True):
            told = self._told[row]
            if row not in again:
                continue
            if told.strayed or ids[at][: len(told.ids)] != told.ids:
                self._failures[row] = RowFailure(
                    "its answer was sampled again after a replica was lost, and is not the one whose tokens were "
                    "handed over"
                )
            elif logprobs is not None and told.logprobs:
                logprobs[at][: len(told.logprobs)] = told.logprobs
        if logprobs is not None:
            device = result.ids.values.device
            result = replace(result, logprobs=Ragged.from_list(logprobs, torch.float32).to(device))
        good = [(at, row) for at, row in zip(part.index, part.rows, strict=True) if row not in self._failures]
        return Part(result, [at for at, _ in good], [row for _, row in good])


def _key(ids: Sequence[int]) -> tuple[int, ...] | None:
    return tuple(ids[:_KEY]) if len(ids) > _KEY else None
