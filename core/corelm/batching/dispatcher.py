"""`Dispatcher`: the threads that take requests from a queue to an engine. Every future is settled exactly once.

A dispatcher knows nothing of the batcher in front of it, so an abandoned batcher is garbage, and its threads end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from corelm.backend.engine import OpenEngine
from corelm.backend.futures import own, settle
from corelm.backend.prepared_call import PreparedCall
from corelm.batching.merging import Result, ask_together, bisect
from corelm.batching.scheduling import Ticket, TicketQueue
from corelm.batching.timers import Timer, Timers
from corelm.errors import BackendClosedError, BackendTimeoutError, CoreLMError, EngineError, QueueFullError


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedCall(Ticket):
    """A request on its way. Without `prepared` it is a turn: the engine is its caller's until it is `released`.

    Attributes:
        owner: what must not be garbage before the request is answered.
        timeout: seconds from its submission until it fails, wherever it is then.
        answered: the engine is done with it.
    """

    prepared: PreparedCall[Any] | None
    owner: object
    timeout: float | None = None
    future: Future[Any] = field(default_factory=Future, init=False)
    released: threading.Event = field(default_factory=threading.Event, init=False)
    end: float | None = field(default=None, init=False)
    timer: Timer | None = field(default=None, init=False)
    answered: bool = field(default=False, init=False)


class Dispatcher:
    """Requests come in by `submit` from any thread; `workers` threads, started when needed, take them to `engine`."""

    def __init__(
        self, engine: OpenEngine, queue: TicketQueue[QueuedCall], workers: int, clock: Callable[[], float]
    ) -> None:
        self.engine, self.queue = engine, queue
        self.batches = self.settled = 0
        self.in_flight: set[QueuedCall] = set()
        # Nobody will see to the last thread but itself.
        self.closed = self._unattended = False
        self.lock = threading.RLock()
        self.clock, self._workers = clock, workers
        self._work = threading.Condition(self.lock)
        self._room = threading.Condition(self.lock)
        self._calls: dict[Future[Any], QueuedCall] = {}
        self._timers = Timers(clock)
        self._threads: set[threading.Thread] = set()
        # Callers' threads that have a turn: they must not wait for one.
        self._turning: set[threading.Thread] = set()
        self._idle = self._generation = 0
        self._process = os.getpid()

    # For callers -----------------------------------------------------------------------------------------------------

    def submit(self, call: QueuedCall, block: bool = True) -> Future[Any]:
        """Queue a call. Where the queue is full it waits outside, and so does its caller if it may `block`.

        Raises:
            BackendClosedError, QueueFullError: as they say.
        """
        if os.getpid() != self._process:
            raise BackendClosedError("this batcher belongs to another process; open the backend where it is needed")
        with self.lock:
            if self.closed:
                raise BackendClosedError("this batcher is closed")
            limits, now = self.queue.limits, self.clock()
            if self.queue.full and limits.on_full == "raise":
                raise QueueFullError(f"{limits.max_queue} requests are waiting, which is max_queue", usable=True)
            self._staff()
            self.queue.add(call, now)
            self._calls[call.future] = call
            if call.timeout is not None:
                call.end = now + call.timeout
                call.timer = self._timers.call_at(call.end, partial(self._expire, call.future))
            self._work.notify()
        call.future.add_done_callback(self._gone)
        if block and not self.mine:
            self._wait_for_room(call)
        return call.future

    @contextmanager
    def turn(self, call: QueuedCall) -> Iterator[None]:
        """The engine is this thread's, in the order of the queue.

        Raises:
            BackendTimeoutError, BackendClosedError: the turn did not come.
        """
        if self.mine:
            yield
            return
        me = threading.current_thread()
        self.submit(call, block=False)
        try:
            call.future.result()
            # What a wrapper asks for from in here is a part of the turn.
            self._turning.add(me)
            yield
        finally:
            self._turning.discard(me)
            call.future.cancel()
            call.released.set()

    @property
    def mine(self) -> bool:
        """Whether this is one of the dispatcher's own threads, or has a turn, and so must not wait for the others."""
        me = threading.current_thread()
        return me in self._threads or me in self._turning or me is self._timers.thread

    def withdraw(self, wanted: Callable[[PreparedCall[Any]], bool]) -> list[QueuedCall]:
        """The calls that are `wanted`, out of the queue, for the caller to settle."""
        with self.lock:
            found = [call for call in self.queue if call.prepared is not None and wanted(call.prepared)]
            for call in found:
                self.queue.remove(call)
            self._notify_all()
        return found

    def left(self, calls: Sequence[QueuedCall]) -> float | None:
        """Seconds until the last of these calls is over; None for never."""
        latest = 0.0
        for call in calls:
            if call.end is None:
                return None
            latest = max(latest, call.end)
        left = latest - self.clock()
        if left <= 0:
            raise BackendTimeoutError(f"backend {self.engine.name!r}: the time was over before the engine was asked")
        return left

    def threads(self) -> list[threading.Thread]:
        with self.lock:
            timers = self._timers.thread
            return [*self._threads, *([] if timers is None else [timers])]

    # Ending ----------------------------------------------------------------------------------------------------------

    def stop(self, *, flush: bool, final: bool, patience: float | None = None) -> None:
        """Answer what is waiting, or refuse it, and end the threads.

        Args:
            flush: answer it. Otherwise what is in the engine is aborted where that is possible, and finished elsewhere.
            final: refuse whatever comes later. Otherwise that finds new threads.
            patience: seconds to wait for the threads; None for as long as it takes.
        """
        with self.lock:
            self.closed |= final
            dropped = [] if flush else self.queue.clear()
            self.queue.rush()
            running = [] if flush else list(self.in_flight)
            pending, threads = list(self._calls), set(self._threads)
            self._notify_all()
        for call in dropped:
            settle(call.future, error=BackendClosedError("batching was ended before this request had its turn"))
        if self.mine:
            # Asked by a callback of a request: the threads end once nothing is left.
            self._unattended = final
            return
        for call in running:
            self._abort(call)
        if flush:
            wait(pending, patience)
        with self.lock:
            for call in list(self.queue):
                if call.future.done():
                    # Cancelled at this moment.
                    self.queue.remove(call)
            self._generation += 1
            threads |= self._threads
            self._notify_all()
        for thread in threads:
            thread.join(patience)
        self._timers.stop(patience)

    def abandon(self) -> None:
        """Nobody waits and nobody comes any more. May be called by the garbage collector in the middle of anything."""
        self.closed = self._unattended = True
        with self.lock:
            self._notify_all()
        if not self._threads:
            self._timers.stop(0)

    # Workers ---------------------------------------------------------------------------------------------------------

    def _staff(self) -> None:
        """See to it that there is a thread for one more call. Under the lock."""
        if self._idle == 0 and len(self._threads) < self._workers:
            thread = threading.Thread(
                target=self._serve_all, args=(self._generation,), name=f"corelm-{self.engine.name}", daemon=True
            )
            self._threads.add(thread)
            try:
                thread.start()
            except BaseException:
                self._threads.discard(thread)
                raise

    def _serve_all(self, generation: int) -> None:
        try:
            while batch := self._next_batch(generation):
                self._serve(batch)
                # An idle thread holds nobody's request.
                del batch
        except BaseException as error:
            self._fail_queue(error)
        finally:
            with self.lock:
                self._threads.discard(threading.current_thread())
                if len(self.queue):
                    self._staff()
                last = self._unattended and not self._threads
            if last:
                self._timers.stop(0)

    def _next_batch(self, generation: int) -> list[QueuedCall]:
        """The next calls to make together; [] to end the thread."""
        with self.lock:
            while True:
                now = self.clock()
                # A thread that belongs to the past goes, and leaves what there is to its successor.
                ended = generation != self._generation
                rows, tokens = (sum(getattr(call, what) for call in self.in_flight) for what in ("rows", "tokens"))
                batch = [] if ended else self.queue.take(now, rows, tokens)
                if batch:
                    self.in_flight.update(batch)
                    self._room.notify_all()
                    if len(self.queue) and self._workers > 1:
                        self._staff()
                        self._work.notify()
                    return batch
                if ended or (self.closed and not len(self.queue)):
                    return []
                self._idle += 1
                try:
                    if not self._work.wait(self.queue.wait(now)):
                        # Even where the clock stands still.
                        self.queue.lose_patience()
                finally:
                    self._idle -= 1

    def _serve(self, batch: list[QueuedCall]) -> None:
        try:
            if batch[0].prepared is None:
                self._give_turn(batch[0])
            else:
                for call, result in bisect(batch, self._ask, self.engine.health):
                    self._answer(call, result)
        except BaseException as error:
            # Even a SystemExit of the engine is an answer to the requests, and no end of the thread.
            for call in batch:
                self._answer(call, self._failure(error))
        finally:
            with self.lock:
                self.in_flight.difference_update(batch)
                # There is room in the engine.
                self._work.notify()

    def _ask(self, calls: Sequence[QueuedCall]) -> list[Result]:
        # Who left in the meantime is not asked for again.
        there = [call for call in calls if not call.future.done()]
        if not there:
            return [BackendClosedError("nobody waits for this")] * len(calls)
        with self.lock:
            self.batches += 1
        prepared = [call.prepared for call in there if call.prepared is not None]
        started = self.clock()
        results = dict(zip(there, ask_together(prepared, self.left(there)), strict=True))
        with self.lock:
            now = self.clock()
            self.queue.came_back(there, now - started, now)
        return [results.get(call, BackendClosedError("nobody waits for this")) for call in calls]

    def _answer(self, call: QueuedCall, result: Result) -> None:
        call.answered = True
        if isinstance(result, Exception):
            settle(call.future, error=own(self._failure(result)))
        else:
            settle(call.future, result)

    def _give_turn(self, call: QueuedCall) -> None:
        call.answered = True
        if settle(call.future):
            call.released.wait()

    def _failure(self, error: BaseException) -> CoreLMError:
        if isinstance(error, CoreLMError):
            return error
        failure = EngineError(f"backend {self.engine.name!r}: the batching thread met {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def _fail_queue(self, error: BaseException) -> None:
        with self.lock:
            calls = self.queue.clear()
            self._notify_all()
        for call in calls:
            settle(call.future, error=own(self._failure(error)))

    # What happens to a request from outside --------------------------------------------------------------------------

    def _gone(self, future: Future[Any]) -> None:
        """Somebody has settled the future: a worker, the timer, or its caller by cancelling it."""
        with self.lock:
            call = self._calls.pop(future, None)
            if call is None:
                return
            self.settled += 1
            if call.timer is not None:
                self._timers.cancel(call.timer)
            if self.queue.remove(call):
                self._notify_all()
            elif call in self.in_flight and not call.answered and self.engine.capabilities.abort:
                # Not here: this may be the thread of an event loop.
                self._timers.call_at(self.clock(), partial(self._abort, call))
        if future.cancelled():
            # Otherwise concurrent.futures.wait would wait for it.
            future.set_running_or_notify_cancel()

    def _expire(self, future: Future[Any]) -> None:
        busy = f"backend {self.engine.name!r}: the time was over before there was an answer"
        settle(future, error=BackendTimeoutError(busy))

    def _abort(self, call: QueuedCall) -> None:
        if call.prepared is not None and self.engine.capabilities.abort:
            try:
                self.engine.abort(call.prepared.request.request_ids)
            except CoreLMError:
                # It goes on, then, and its answer is dropped.
                return

    def _wait_for_room(self, call: QueuedCall) -> None:
        try:
            with self.lock:
                while call.number in self.queue.outside:
                    self._room.wait()
        except BaseException:
            call.future.cancel()
            raise

    def _notify_all(self) -> None:
        with self.lock:
            self._work.notify_all()
            self._room.notify_all()
