"""`Call`: a call of a hook on its way through core, what core tells wrappers about it, and `Delivery` of its tokens.

A request says what the engine is to do. Plugins pickle requests and send them to other processes, so the callers'
context variables and clocks are not in it: a wrapper asks `current_call` on the thread on which its hook is called.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from corelm.errors import CoreLMError, EngineError, described, is_interrupt
from corelm.spec.records import GenerateResult, TokenChunk
from corelm.validate import invalid


class Call:
    """A call of a hook: its request, and how its result becomes the caller's.

    Attributes:
        rows: number of rows. No engine is asked for a call without rows.
        callers: how many users' calls it serves.
        origins: these calls, if the engine has wrappers, which measure them.
        deliveries: hand tokens to those of these callers that read along.
    """

    hook: str
    request: Any
    rows: int = 1
    callers: int = 1
    origins: Sequence[Origin] = ()
    deliveries: Sequence[Delivery] = ()

    def __init__(self, hook: str, request: Any) -> None:
        self.hook, self.request = hook, request

    def nothing(self) -> Any:
        """Return the result of a call without rows."""

    def finish(self, result: Any) -> Any:
        """Return the caller's result, made from the engine's, which was checked. The weights cannot change yet."""
        return result

    def failed(self, error: CoreLMError) -> CoreLMError:
        """Return the caller's error, made from that of the hook."""
        return error


@dataclass(slots=True)
class Arrival:
    """When the first tokens of one answer came out of the engine, when the last so far, in the seconds of
    `time.monotonic`, and how many tokens came `later` than the first ones.
    """

    first: float
    last: float
    later: int = 0


@dataclass(eq=False, slots=True)
class Origin:
    """A user's call on its way to the engine, which the batcher may merge with others.

    Attributes:
        rows: its rows in the engine's result.
        arrivals: when the tokens of its rows came, by its own row numbers. Only rows whose tokens the engine
            delivers while it samples are in it, so it is empty if the caller does not read along.
        asked: when its arguments had been checked, in the seconds of `time.monotonic`.
        context: the context variables of the caller. Enter a copy of it: another thread may be in this one.
        sent: how often the engine has been asked for it.
    """

    rows: int
    arrivals: Mapping[int, Arrival] = field(default_factory=dict)
    asked: float = field(default_factory=time.monotonic)
    context: Context = field(default_factory=copy_context)
    sent: int = 0


@dataclass(eq=False, slots=True)
class EngineCall:
    """The call of a hook.

    Attributes:
        backend: the name that the engine was opened by.
        model: the name that labels its numbers.
        origins: the users' calls that it serves, in the order of their rows. Empty for hooks other than
            `generate` and `score_logprobs`, and for calls that core makes for itself.
        asked: when core was asked for it, in the seconds of `time.monotonic`. It has waited for the engine since then.
        attempt: how many times, this one included, the engine has been asked for it, or for a part of it.
    """

    backend: str
    model: str
    origins: Sequence[Origin] = ()
    asked: float = field(default_factory=time.monotonic)
    attempt: int = 0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Make this the `current_call` of the thread in the block, in which the engine is asked once more."""
        for origin in self.origins:
            self.attempt = max(self.attempt, origin.sent)
        self.attempt += 1
        for origin in self.origins:
            origin.sent = self.attempt
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[EngineCall | None] = ContextVar("corelm_engine_call", default=None)


def current_call() -> EngineCall | None:
    """Return the call that this thread is in; None outside the hooks of an engine."""
    return _current.get()


#: Takes the chunks of a call, with the caller's numbers of the rows, from one thread at a time. A thread of
#: the engine calls it, so it has to return at once, and must not ask the backend for anything. If it fails, its
#: own caller gets an error.
Listener = Callable[[TokenChunk], Any]


class Delivery:
    """Checks the chunks of one call and hands them on. It is the ``on_tokens`` of the call's request.

    A chunk that breaks the specification ends the delivery, and `compare` then fails the call.

    Args:
        rows: the caller's row for each row of the request's result.
        prompts: the caller's prompts, each with so many samples, if the text of an answer continues its prompt's.

    Attributes:
        started: whether the listener has been given something. Such a call is not repeated.
        under_way: whether the engine works on the call.
        arrivals: when the tokens of each row came out of the engine, by the rows of the request's result.
    """

    def __init__(
        self,
        listener: Listener,
        rows: Sequence[int],
        vocab_size: int,
        with_logprobs: bool,
        prompts: Sequence[Tensor] = (),
        samples: int = 1,
    ) -> None:
        self.started = self.under_way = self._left = False
        self.arrivals: dict[int, Arrival] = {}
        self._listener, self._rows, self._prompts, self._samples = listener, rows, prompts, samples
        self._vocab_size, self._with_logprobs = vocab_size, with_logprobs
        self._ids: list[list[int]] = [[] for _ in rows]
        self._logprobs: list[list[float]] = [[] for _ in rows]
        self._reasons: list[str | None] = [None for _ in rows]
        self._fault, self._broken = "", ""
        # Reentrant, because a listener may leave while it is called.
        self._lock = threading.RLock()

    def __call__(self, chunk: TokenChunk) -> None:
        """Take a chunk from the engine."""
        with self._lock:
            if not self.under_way or self._fault:
                return
            try:
                ids, logprobs = self._checked(chunk)
            except Exception as error:
                self._fault = str(error) if isinstance(error, ValueError) else described(error)
                return
            row, now = chunk.row, time.monotonic()
            if (known := self.arrivals.get(row)) is not None:
                known.last, known.later = now, known.later + len(ids)
            elif ids:
                self.arrivals[row] = Arrival(now, now)
            self._ids[row] += ids
            self._logprobs[row] += logprobs
            self._reasons[row] = chunk.finish_reason
            self._tell(self._rows[row], ids, logprobs, chunk.finish_reason)

    def prompt_of(self, row: int) -> list[int]:
        """Return the ids whose text a row of the caller's continues."""
        return self._prompts[row // self._samples].tolist() if self._prompts else []

    def begin(self) -> bool:
        """Note that the engine begins with the call. Return False if the caller has left."""
        with self._lock:
            self.under_way = not self._left
            return self.under_way

    def end(self) -> None:
        """Note that the engine is done with the call. Chunks that come later are dropped."""
        with self._lock:
            self.under_way = False

    def leave(self) -> None:
        """Hand on nothing more, because the caller has left."""
        with self._lock:
            self._left = True

    def compare(self, batch: GenerateResult, fail: Callable[[str], EngineError]) -> None:
        """Fail if a chunk was wrong, or those of a row, joined, are not that row of the result, or its beginning.

        A row that failed has no answer to compare with. A listener that has failed is its caller's error.
        """
        self._require_listener()
        if self._fault:
            raise fail(f"on_tokens: {self._fault}")
        logprobs = None if batch.logprobs is None else batch.logprobs.tolist()
        for row, (ids, reason) in enumerate(zip(batch.ids.tolist(), batch.finish_reasons, strict=True)):
            told = self._ids[row]
            if reason == "error" or not (told or self._reasons[row]):
                continue
            if batch.texts is not None:
                raise fail(f"row {row}: handed its tokens to on_tokens, and returned texts; texts cannot be streamed")
            count = len(told) if self._reasons[row] is None else len(ids)
            if told != ids[:count]:
                raise fail(f"row {row}: handed {len(told)} tokens to on_tokens that are not the {len(ids)} it returned")
            if self._with_logprobs and (logprobs is None or self._logprobs[row] != logprobs[row][:count]):
                raise fail(f"row {row}: handed other log-probs to on_tokens than it returned")
            if self._reasons[row] not in (None, reason):
                raise fail(f"row {row}: finish reason {self._reasons[row]!r} in on_tokens, {reason!r} in the result")

    def complete(self, batch: GenerateResult) -> None:
        """Send the caller the tokens and finish reasons that the engine did not stream."""
        told = {row: (len(self._ids[at]), self._reasons[at]) for at, row in enumerate(self._rows)}
        logprobs = None if batch.logprobs is None else batch.logprobs.tolist()
        with self._lock:
            for row, (ids, reason) in enumerate(zip(batch.ids.tolist(), batch.finish_reasons, strict=True)):
                known, ended = told.get(row, (0, None))
                if ended is None:
                    values = [] if logprobs is None else logprobs[row][known:]
                    text = None if batch.texts is None else batch.texts[row]
                    self._tell(row, ids[known:], values, reason, text)
        self._require_listener()

    def _require_listener(self) -> None:
        if self._broken:
            raise invalid("on_tokens", f"it failed, and was given nothing more: {self._broken}")

    def _tell(
        self, row: int, ids: Sequence[int], logprobs: Sequence[float], reason: str | None, text: str | None = None
    ) -> None:
        if self._left or self._broken:
            return
        self.started = True
        told = TokenChunk(row=row, ids=tuple(ids), logprobs=tuple(logprobs), finish_reason=reason, text=text)
        try:
            self._listener(told)
        except BaseException as error:
            if is_interrupt(error):
                raise
            # The engine, and the callers whose requests it answers in the same call, have no part in it.
            self._broken = described(error)

    def _checked(self, chunk: TokenChunk) -> tuple[list[int], list[float]]:
        """Return the ids and the log-probs of a chunk, these rounded to float32 as in the result."""
        row, ids = chunk.row, list(chunk.ids)
        if type(row) is not int or not 0 <= row < len(self._rows):
            raise ValueError(f"row {row!r} is not one of the {len(self._rows)} rows of the result")
        if self._reasons[row] is not None:
            raise ValueError(f"row {row}: got more after its last chunk")
        for token in ids:
            # The reader decodes it before the result is there to compare it with.
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise ValueError(f"row {row}: id {token!r} is not an int in the vocabulary of {self._vocab_size}")
        return ids, array("f", chunk.logprobs).tolist() if self._with_logprobs else []
