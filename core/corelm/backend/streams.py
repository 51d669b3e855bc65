"""`AnswerStream` and `AsyncAnswerStream`: answers that are read while the engine samples them.

The engine's thread puts the chunks of a call into a queue, and the reader takes them out and decodes their
text. The queue has no limit: a slow reader costs memory, a few hundred bytes a token, and never makes the
engine or other callers wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from corelm.backend.engine import PreparedCall
from corelm.backend.engine_call import Listener
from corelm.backend.futures import in_thread, uninterrupted
from corelm.errors import BackendClosedError
from corelm.spec.answer_text import AnswerText, AnswerTexts
from corelm.spec.records import GenerateRequest, GenerateResult, TokenChunk
from corelm.tensors.modes import in_caller_modes
from corelm.validate import invalid
from corelm.waiting import next_item

T = TypeVar("T")
#: Prepares a call whose tokens go to a listener, and returns it with a function that makes the stream's result of its.
Prepare = Callable[[Listener], tuple[PreparedCall[GenerateResult], Callable[[GenerateResult], T]]]

#: Seconds that closing a stream waits for the engine to let go of the request, and seconds between two looks at it.
_GRACE_PERIOD, _PAUSE = 1.0, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChunk:
    """New tokens of one answer.

    Attributes:
        row: the answer's row, counted in C order over the batch; with `num_samples`, the answers to one
            prompt follow each other.
        text: the text that is new and certain. It may be empty: half a character, or what may be the beginning
            of a stop string, waits for the next tokens. The texts of a row, joined, are the text of the answer.
        ids: the new tokens.
        logprobs: one per id, of the distribution that was asked for; empty if none were asked for.
        finish_reason: why the answer ended, in its last chunk; None in the others.
    """

    row: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None = None


class _Backend(Protocol):
    """The methods of `Backend` that streams call. Its module imports this one, so the class cannot be imported here."""

    def submit(self, call: PreparedCall[Any]) -> Future[Any]: ...

    def require_outside(self, field: str) -> None: ...


class _Stream(Generic[T]):
    """The base of both streams: a call whose tokens the caller reads while the engine works on it, and its result."""

    _call: PreparedCall[GenerateResult] | None = None
    _future: Future[Any] | None = None
    _result: T | None = None
    _ended = False
    _finish: Callable[[GenerateResult], T]

    @property
    def result(self) -> T:
        """The result of the whole call, once the last chunk has been read; refused before."""
        if self._result is None:
            raise invalid("result", "the stream has no result before its last chunk was read; read it to its end")
        return self._result

    def _start(self, backend: _Backend, call: PreparedCall[GenerateResult], put: Callable[[Any], object]) -> None:
        """Make the call. `put` takes its chunks, and None after the last. It must not refer to the stream: the engine
        would keep it alive after its reader has dropped it.
        """
        assert isinstance(call.request, GenerateRequest)
        self._new_text = AnswerTexts(call.request.sampling, call.engine.tokenizer).answer
        self._texts: dict[int, AnswerText] = {}
        done = self._done = threading.Event()
        self._call = call

        def tell_end(future: Future[Any]) -> None:
            done.set()
            put(None)

        def start() -> None:
            self._future = backend.submit(call)
            self._future.add_done_callback(tell_end)
            if self._ended:
                self._future.cancel()

        try:
            uninterrupted(in_caller_modes(start))
        except BaseException:
            # For example a KeyboardInterrupt, after which no reader is left. `start` may still be running: it
            # cancels the future if this is too early for that.
            self._leave()
            raise

    def _chunk(self, event: TokenChunk) -> AnswerChunk:
        assert self._call is not None
        row, ids, reason = event.row, tuple(event.ids), event.finish_reason
        if row not in self._texts:
            self._texts[row] = self._new_text(self._call.deliveries[0].prompt_of(row))
        text = self._texts[row].add(ids, reason, event.text)
        return AnswerChunk(row=row, text=text, ids=ids, logprobs=tuple(event.logprobs), finish_reason=reason)

    def _answer(self) -> GenerateResult:
        """Return the result of the call, which has ended, or raise its error."""
        assert self._future is not None
        if self._future.cancelled():
            raise BackendClosedError("the request was cancelled")
        result: GenerateResult = self._future.result()
        return result

    def _leave(self) -> None:
        """End the request without waiting."""
        self._ended = True
        if self._call is not None:
            self._call.deliveries[0].leave()
        if self._future is not None and not self._done.is_set():
            uninterrupted(self._future.cancel)

    def _pauses(self) -> Iterator[float]:
        """Yield how long to sleep, again and again, until an engine that can abort has let go of a request that left,
        for `_GRACE_PERIOD` seconds at most. An engine that answers others in the same call is not waited for.
        """
        if (call := self._call) is not None and call.engine.capabilities.abort:
            end = time.monotonic() + _GRACE_PERIOD
            while call.engine.works_on(call.request.request_ids) and time.monotonic() < end:
                yield _PAUSE

    def __del__(self) -> None:
        if self._future is not None and not self._done.is_set():
            # On a thread, because the garbage collector may call this at any point of any code. At exit no
            # thread starts.
            with suppress(RuntimeError):
                in_thread(self._leave, "corelm-stream-end")


class AnswerStream(_Stream[T], Iterator[AnswerChunk]):
    """The chunks of the answers to one call, as they come: an iterator and a context manager.

    Leaving the ``with`` block early, `close`, or dropping the stream aborts the request in an engine that can
    abort. Another engine finishes the answers, and they are dropped.
    """

    def __init__(self, backend: _Backend, prepare: Prepare[T]) -> None:
        self._events: SimpleQueue[TokenChunk | None] = SimpleQueue()
        backend.require_outside("stream")
        call, self._finish = prepare(self._events.put)
        self._start(backend, call, self._events.put)

    def __next__(self) -> AnswerChunk:
        if self._ended:
            raise StopIteration
        try:
            event = next_item(self._events)
            if event is not None:
                return self._chunk(event)
            self._result = self._finish(self._answer())
        except BaseException:
            # For example a KeyboardInterrupt, or an error of the engine.
            self._leave()
            raise
        self._ended = True
        raise StopIteration

    def close(self) -> None:
        """End the request if it is under way, and wait up to a second until an engine that can abort has let go of it.

        An engine that answers other callers in the same call goes on, and is not waited for. Chunks that were
        not read are dropped. Closing twice is fine.
        """
        self._leave()
        for pause in self._pauses():
            time.sleep(pause)

    def __enter__(self) -> AnswerStream[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncAnswerStream(_Stream[T], AsyncIterator[AnswerChunk]):
    """The chunks of the answers to one call, as they come: an asynchronous iterator and context manager.

    The request is made when the first chunk is asked for. No thread waits for the chunks. Leaving the ``async with``
    block early, `aclose`, cancelling the task, or dropping the stream ends the request as `AnswerStream` does.
    """

    def __init__(self, backend: _Backend, prepare: Prepare[T]) -> None:
        self._backend, self._prepare = backend, prepare
        self._events: asyncio.Queue[TokenChunk | None] = asyncio.Queue()

    async def __anext__(self) -> AnswerChunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            if self._call is None:
                await self._begin()
            event = await self._events.get()
            if event is not None:
                return self._chunk(event)
            self._result = await asyncio.to_thread(self._finish, self._answer())
        except BaseException:
            # For example a CancelledError, or an error of the engine.
            self._leave()
            raise
        self._ended = True
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the request if it is under way, as `AnswerStream.close` does, without needing a thread."""
        self._leave()
        for pause in self._pauses():
            await asyncio.sleep(pause)

    async def __aenter__(self) -> AsyncAnswerStream[T]:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _begin(self) -> None:
        self._backend.require_outside("astream")
        loop, put = asyncio.get_running_loop(), self._events.put_nowait

        def tell(event: TokenChunk | None) -> None:
            # A loop that is closed has no reader any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(put, event)

        call, self._finish = await asyncio.to_thread(self._prepare, tell)
        if self._ended:
            # Another task has closed the stream in the meantime.
            raise BackendClosedError("the stream was closed before its request was made")
        self._start(self._backend, call, tell)
