"""`DynamicBatcher`: a backend whose callers, on any number of threads and in any number of tasks, share its calls."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import RLock
from typing import Any, TypeVar

from corelm.backend.backend import Backend
from corelm.backend.engine import GRACE_PERIOD, PreparedCall, R, end_calls
from corelm.backend.futures import join
from corelm.backend.program_end import at_program_end, program_deadline
from corelm.batching.dispatcher import Dispatcher, QueuedCall, sharing_key
from corelm.batching.scheduling import Limits, TicketQueue
from corelm.errors import EngineError, is_main_thread
from corelm.spec.records import GenerateRequest, When
from corelm.spec.row_results import RowAnswer, generate_result
from corelm.tensors.modes import CallerModes, no_inference_mode
from corelm.validate import invalid, seconds, shown

T = TypeVar("T")

#: Requests in an engine with `concurrent_calls`, where `max_batch_size` sets no limit: each takes a thread.
MOST_THREADS = 4096
#: Seconds that a policy waits at most until another thread has read its input or written its result.
_LONGEST_WAIT = 0.25
#: Seconds that an ending program waits for daemon threads whose calls it has ended.
_CALLERS_END = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingState:
    """The state of a batcher at one moment.

    Attributes:
        queued: requests that wait.
        queued_rows: rows of these requests.
        queued_tokens: tokens of these requests, given and to be sampled.
        outside: those of these requests that `max_queue` keeps out of the queue proper.
        oldest_wait: seconds that the oldest request has waited; 0.0 if none waits.
        in_flight: requests in the engine.
        batches: calls to the engine so far.
        settled: requests answered, failed or cancelled so far.
        threads: living threads of the batcher.
        closed: whether the batcher was closed.
    """

    queued: int
    queued_rows: int
    queued_tokens: int
    outside: int
    oldest_wait: float
    in_flight: int
    batches: int
    settled: int
    threads: int
    closed: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class DynamicBatcher(Backend):
    """A backend in front of an opened `Backend`, whose callers share the engine's calls.

    Requests with equal execution parameters (all but prompts and seeds) share a call, first in, first out,
    within the `Limits`. An invalid request is refused before it is queued, and a request that fails in the
    engine fails alone. Sharing changes no answer in float32: every answer keeps the seed that it has without
    sharing. In lower precision the other rows of a batch can change the last bits of a sum.

    A call has the gradient mode, autocast and CUDA device of the threads that made its requests. Requests
    that differ in these do not share a call. It does not have their context variables.

    One thread calls an engine that takes one call at a time. An engine that declares `concurrent_calls`
    batches by itself (but see `merge`): it gets one call per request, each on a thread of its own, and the
    limits bound the rows and tokens in flight. Without `max_batch_size`, up to 4,096 requests are in flight.

    Scoring with gradients or logits shares no call. It runs in its turn on the caller's own thread, because
    autograd's settings belong to a thread. `update_weights`, `weights_changed` and `sleep` wait for the
    requests before them, and later requests wait for them; with ``when="abort"`` or ``"now"`` nothing waits
    in the queue. Requests that come while the engine sleeps are refused.

    A request's timeout starts when the request is made. A shared call gets the time of the request that has most
    left, and each request fails when its own time is over. ``get_backend(retry=…)`` repeats a shared call as a whole.

    Args:
        backend: an opened backend that is not batched.
        limits: how requests are combined; None for the defaults.
        merge: False passes each request on at once to an engine whose calls share decoding steps (transformers),
            so that none waits for the end of others. One call with many rows is faster than many calls.
        clock: returns seconds and never goes back.

    Attributes:
        backend: the backend behind this one.
        limits: how requests are combined.
        dispatcher: the queue and the threads. Read its attributes, but do not call it.

    Raises:
        InvalidRequestError: an illegal argument; `field` names it.
    """

    def __init__(
        self,
        backend: Backend,
        limits: Limits | None = None,
        *,
        merge: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(backend, DynamicBatcher) or not isinstance(backend, Backend):
            raise invalid("backend", f"expected an opened backend that is not batched, got {shown(backend)}")
        if limits is not None and not isinstance(limits, Limits):
            raise invalid("limits", f"expected Limits or None, got {shown(limits)}")
        super().__init__(backend.engine)
        self.backend = backend
        self.limits = limits or Limits()
        steps_are_shared = backend.capabilities.concurrent_calls and backend.engine.on_caller_threads
        concurrent = backend.capabilities.concurrent_calls and not (merge and steps_are_shared)
        workers = (self.limits.max_batch_size or MOST_THREADS) if concurrent else 1
        self.dispatcher = Dispatcher(self.engine, TicketQueue(self.limits, concurrent), workers, clock)
        self._host = None if concurrent else RLock()
        _DISPATCHERS.add(self.dispatcher)
        weakref.finalize(self, self.dispatcher.abandon).atexit = False

    def __repr__(self) -> str:
        return f"DynamicBatcher({self.backend!r})"

    def run(self, call: PreparedCall[R]) -> R:
        """Make a prepared call in its turn, together with others where they may share, and return its result."""
        if not call.rows or self.dispatcher.mine:
            # A callback or a wrapper makes this call, and its thread would wait for itself.
            return super().run(call)
        if call.on_caller_thread:
            turn = self._ticket(call, turn=True)
            return self.dispatcher.in_turn(turn, lambda: self.engine.call(call, self.dispatcher.left([turn])))
        answer: R = self.dispatcher.ask(self._ticket(call))
        return answer

    @contextmanager
    def host_turn(self, timeout: float | None = None) -> Iterator[None]:
        """Let the policies of one thread at a time read and write, if callers are answered together.

        Each operation of torch releases the interpreter's lock. Among many callers who go on at the same time, each
        release would switch threads, and reading and writing would take three times as long. No thread waits longer
        than 0.25 s, as one that reads or writes may run code of its caller (a parser of answers) that waits for others,
        or than half the `timeout` of its call. The engine then has the whole timeout.
        """
        allowed = self.timeout if timeout is None else seconds("timeout", timeout)
        longest = _LONGEST_WAIT if allowed is None else min(allowed / 2, _LONGEST_WAIT)
        # An interrupt, which comes to the main thread only, could leave the lock taken.
        taken = self._host is not None and not is_main_thread() and self._host.acquire(timeout=longest)
        try:
            yield
        finally:
            if taken and self._host is not None:
                self._host.release()

    def submit(self, call: PreparedCall[R], *, block: bool = False) -> Future[R]:
        """Queue a prepared call and return its future; `block` lets this thread wait for room. See `Backend.submit`."""
        if not call.rows:
            done: Future[R] = Future()
            done.set_result(self.engine.call(call))
            return done
        return self.dispatcher.submit(self._ticket(call), block)

    @property
    def entered(self) -> bool:
        """Whether this thread is in a call to the engine or belongs to the batcher, and so must not wait for others."""
        return self.dispatcher.mine

    def _ticket(self, call: PreparedCall[Any], *, turn: bool = False) -> QueuedCall:
        modes = CallerModes()
        prepared, key = (None, None) if turn else (call, sharing_key(call, modes))
        asked: dict[str, Any] = {"rows": call.rows, "tokens": call.tokens, "timeout": call.request.timeout}
        return QueuedCall(prepared=prepared, key=key, batcher=self, modes=modes, **asked)

    def _in_turn(self, change: Callable[[], T], when: When = "drain") -> T:
        if when != "drain":
            return change()
        return self.dispatcher.in_turn(QueuedCall(prepared=None, batcher=self, rows=1, tokens=0, barrier=True), change)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests as `Backend.abort` does.

        A request that is still queued ends only if all of its rows are named. A queued scoring request then fails.
        """
        self.engine.require("abort", "its requests cannot be aborted")
        names = frozenset(request_ids)
        for call in self.dispatcher.withdraw(lambda prepared: names.issuperset(prepared.request.request_ids)):
            _abort(call)
        super().abort(request_ids)

    def cleanup(self, *, flush: bool = True) -> None:
        """Answer the waiting requests and end the threads. The engine stays open; a later request starts a thread.

        Args:
            flush: False fails the waiting requests with `BackendClosedError` instead.
        """
        self.dispatcher.stop(flush=flush, final=False)

    def close(self, *, flush: bool = True) -> None:
        """Answer the waiting requests, end the threads and close the engine.

        Errors are those of `Backend.close`.

        Args:
            flush: True also waits for the calls under way, as long as their callers do. False fails the waiting
                requests with `BackendClosedError`, and aborts the calls under way if the engine can abort. After 5
                seconds it fails these as well, except for a call that computes gradients on its caller's own thread.
        """
        ended = True
        try:
            ended = self.dispatcher.stop(flush=flush, final=True)
        finally:
            # If a thread is left, the grace period of its call is over.
            self.engine.close(grace=GRACE_PERIOD if ended else 0.0)

    def _end(self, well: bool) -> None:
        self.close(flush=well)

    def state(self) -> BatchingState:
        """Return what the batcher is doing at this moment.

        Raises:
            BackendClosedError: this is a fork of the process that opened the backend.
        """
        self.engine.require_here()
        return self.dispatcher.read(self._state)

    def _state(self) -> BatchingState:
        dispatcher = self.dispatcher
        queued, in_flight = list(dispatcher.queue), len(dispatcher.in_flight)
        return BatchingState(
            queued=len(queued),
            queued_rows=sum(call.rows for call in queued),
            queued_tokens=sum(call.tokens for call in queued),
            outside=len(dispatcher.queue.outside),
            oldest_wait=max(0.0, dispatcher.clock() - queued[0].arrived) if queued else 0.0,
            in_flight=in_flight,
            batches=dispatcher.batches,
            settled=dispatcher.queue.arrivals - len(queued) - in_flight,
            threads=len(dispatcher.threads()),
            closed=dispatcher.closed,
        )


@no_inference_mode()
def _abort(call: QueuedCall) -> None:
    """Give the caller of a queued request empty answers, each with the finish reason `abort`."""
    assert call.prepared is not None
    try:
        if not isinstance(call.prepared.request, GenerateRequest):
            raise EngineError("the request was aborted before it was scored", usable=True)
        # Notice a change by the owner of the model first: the answers are labelled, and no call is made.
        call.prepared.engine.weights.version_with(None)
        none = generate_result(call.prepared.request, [RowAnswer([], [], "abort")] * call.rows)
        call.settle(call.prepared.finish(none))
    except EngineError as error:
        call.settle(error=error)


_DISPATCHERS: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def stop_together(dispatchers: Sequence[Dispatcher], end: float) -> None:
    """Stop the dispatchers, and end the calls in their engines until `end`, in the seconds of `time.monotonic`."""
    callers = {thread for dispatcher in dispatchers for thread in dispatcher.daemons()}
    # All are told to end before one is waited for.
    for dispatcher in dispatchers:
        dispatcher.begin_stop(flush=False, final=True)
    # Without a thread: at the end of the program, some releases of Python start none.
    end_calls([dispatcher.engine for dispatcher in dispatchers], end)
    for dispatcher in dispatchers:
        dispatcher.stop(flush=False, final=True, grace=max(0.0, end - time.monotonic()))
    # A thread that computes with torch while Python is taken down crashes it. These have just been told to stop.
    join(callers, min(_CALLERS_END, end - time.monotonic()))


@at_program_end
def _stop_all() -> None:
    if dispatchers := list(_DISPATCHERS):
        stop_together(dispatchers, program_deadline())
