"""`Dispatcher`: the threads that take requests from a queue to an engine. Every future is settled exactly once.

A dispatcher does not refer to the batcher in front of it, so an abandoned batcher is garbage-collected and its threads
end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from corelm.backend.aborts import Aborts
from corelm.backend.engine import PATIENCE, OpenEngine
from corelm.backend.futures import join, own, settle, start, unfinished, uninterrupted
from corelm.backend.prepared_call import PreparedCall
from corelm.batching.in_engine import InEngine
from corelm.batching.merging import Result, ask_together, bisect
from corelm.batching.queued_call import QueuedCall, failure, time_left
from corelm.batching.scheduling import TicketQueue
from corelm.batching.timers import Timers
from corelm.errors import BackendClosedError, EngineError
from corelm.waiting import NOTICE, next_item

T = TypeVar("T")


class Dispatcher:
    """Takes requests, which any thread may `submit`, to an engine.

    Args:
        engine: the engine to call.
        queue: decides which requests go next.
        workers: the largest number of threads that call the engine; they are started when needed.
        clock: returns seconds and never goes back.

    Attributes:
        batches: calls to the engine so far.
        settled: requests answered, failed or cancelled so far.
        in_flight: requests in the engine.
        pending: the requests that have no result yet, by their future.
        closed: whether the dispatcher refuses new requests.
        lock: protects all of these; hold it to read several of them together.
    """

    def __init__(
        self, engine: OpenEngine, queue: TicketQueue[QueuedCall], workers: int, clock: Callable[[], float]
    ) -> None:
        self.engine, self.queue = engine, queue
        self.batches = self.settled = 0
        self.in_flight = InEngine(queue, workers, engine.name)
        self.pending: dict[Future[Any], QueuedCall] = {}
        # Whether the last worker has to stop the timers, because no caller will.
        self.closed = self._unattended = False
        self.lock = threading.RLock()
        self.clock, self._workers = clock, workers
        self._work = threading.Condition(self.lock)
        self._room = threading.Condition(self.lock)
        self._timers = Timers(clock)
        self._threads: set[threading.Thread] = set()
        self._aborts = Aborts(engine.abort, engine.name)
        self._idle = self._generation = 0

    # For callers -----------------------------------------------------------------------------------------------------

    def submit(self, call: QueuedCall, block: bool = True) -> Future[Any]:
        """Queue a call and return its future.

        Args:
            block: whether this thread may wait for room in a full queue. Otherwise only the call waits.

        Raises:
            BackendClosedError: the batcher is closed, or belongs to another process.
            EngineError: the system has no room for a thread that the call needs; it is not queued.
            QueueFullError: the queue is full, with ``on_full="raise"``.
        """
        self.engine.require_here()
        uninterrupted(partial(self._add, call))
        if block and not self.mine:
            self._wait_for_room(call)
        return call.future

    def ask(self, call: QueuedCall) -> Any:
        """Queue a call, wait for its answer and return it. If the wait is interrupted, the call is cancelled."""
        # Not `Future.result`: an interrupt in it can leave the future's lock locked, and a worker would wait for it.
        answered: SimpleQueue[Future[Any]] = SimpleQueue()
        call.future.add_done_callback(answered.put)
        try:
            self.submit(call, block=False)
            next_item(answered)
        except BaseException:
            uninterrupted(call.future.cancel)
            raise
        try:
            return call.future.result()
        finally:
            # The error's traceback refers to this frame.
            del call

    def in_turn(self, call: QueuedCall, function: Callable[[], T]) -> T:
        """Wait for this thread's turn in the queue, and call the function while the engine is this thread's.

        Raises:
            BackendTimeoutError: the turn did not come in time.
            BackendClosedError: the batcher was closed before the turn came.
        """
        if self.mine:
            return function()
        try:
            self.ask(call)
            return function()
        finally:
            # In one call, which no interrupt can divide.
            call.released.put(None)

    @property
    def mine(self) -> bool:
        """Whether this thread is one of the dispatcher's own or in the engine, and so must not wait for the queue."""
        me = threading.current_thread()
        own = me in self._threads or me is self._timers.thread or me is self._aborts.thread
        return own or self.engine.entered

    def withdraw(self, wanted: Callable[[PreparedCall[Any]], bool]) -> list[QueuedCall]:
        """Remove the `wanted` calls from the queue and return them, for the caller to settle."""
        self.engine.require_here()

        def remove() -> list[QueuedCall]:
            with self.lock:
                found = [call for call in self.queue if call.prepared is not None and wanted(call.prepared)]
                for call in found:
                    self.queue.remove(call)
                self._notify_all()
            return found

        return uninterrupted(remove)

    def left(self, calls: Sequence[QueuedCall]) -> float | None:
        """Return the seconds that these calls have left; see `time_left`."""
        return time_left(calls, self.clock(), self.engine.name)

    def threads(self) -> list[threading.Thread]:
        with self.lock:
            return [*self._threads, *filter(None, (self._timers.thread, self._aborts.thread))]

    # Ending ----------------------------------------------------------------------------------------------------------

    def stop(self, *, flush: bool, final: bool, patience: float = PATIENCE) -> bool:
        """Answer or refuse the waiting requests and end the threads. Return whether all have ended. A fork ends none.

        Args:
            flush: True answers them. False refuses them and aborts the requests in the engine if it can abort; another
                engine finishes them.
            final: True refuses later requests, and without `flush` fails those still in the engine after `patience`
                seconds. False starts new threads for later requests.
            patience: seconds to wait in all for calls that no caller waits for. Their threads then end with them.
        """
        return self.begin_stop(flush=flush, final=final)(patience)

    def begin_stop(self, *, flush: bool, final: bool) -> Callable[[float], bool]:
        """Do the part of `stop` that waits for nothing, and return a function for the rest, which takes `patience`."""
        if self.engine.elsewhere:
            self.closed |= final
            return lambda patience: True
        with self.lock:
            self.closed |= final
            dropped = [] if flush else self.queue.clear()
            self.queue.rush()
            running = [] if flush else list(self.in_flight)
            pending, threads = list(self.pending), set(self._threads)
            self._notify_all()
        advice = "open the backend again with get_backend" if final else "send it again"
        for call in dropped:
            why = f"the batcher was stopped before this request reached the engine; {advice}"
            settle(call.future, error=BackendClosedError(why))
        if self.mine:
            # A request's callback calls this. The threads end once the queue is empty.
            self._unattended = final
            return lambda patience: True
        for call in running:
            self._abort(call)

        def end_threads(patience: float) -> bool:
            unfinished(pending if flush else [])
            end = time.monotonic() + patience
            for future in unfinished([call.future for call in running if final], patience):
                why = f"the batcher was closed before the engine had finished this request; {advice}"
                settle(future, error=BackendClosedError(why))
            with self.lock:
                for call in list(self.queue):
                    if call.future.done():
                        # Its caller has just cancelled it.
                        self.queue.remove(call)
                self._generation += 1
                threads.update(self._threads)
                self._notify_all()
            left = join(threads, max(0.0, end - time.monotonic()), self._awaited if flush or not final else None)
            left = join(filter(None, [self._aborts.thread]), left)
            self._timers.stop(left)
            return not self.threads()

        return end_threads

    def _awaited(self) -> bool:
        """Return whether a caller waits for a call in the engine."""
        with self.lock:
            return any(call.prepared is None or not call.future.done() for call in self.in_flight)

    def abandon(self) -> None:
        """End without waiting, as no caller is left. The garbage collector may call this at any point of any code."""
        self.closed = self._unattended = True
        if self.engine.elsewhere:
            return
        with self.lock:
            self._notify_all()
        if not self._threads:
            self._timers.stop(0)

    # Workers ---------------------------------------------------------------------------------------------------------

    def _add(self, call: QueuedCall) -> None:
        with self.lock:
            if self.closed:
                raise BackendClosedError("this batcher is closed; open the backend again with get_backend")
            self.queue.require_room()
            now = self.clock()
            self._staff()
            # Before the call is queued: the system may have no room for the timers' thread.
            if call.timeout is not None:
                call.end = now + call.timeout
                call.timer = self._timers.call_at(call.end, partial(call.expire, self.engine.name))
            self.queue.add(call, now)
            self.in_flight.tell_if_others_wait()
            self.pending[call.future] = call
            self._work.notify()
        call.future.add_done_callback(self._gone)

    def _staff(self) -> None:
        """Start a thread if one more call needs one, or fail if there is no room for the first. The caller locks."""
        if self._idle == 0 and len(self._threads) < self._workers:
            thread = threading.Thread(
                target=self._serve_all, args=(self._generation,), name=f"corelm-{self.engine.name}", daemon=True
            )
            self._threads.add(thread)
            try:
                start(thread, "the batcher")
            except EngineError:
                self._threads.discard(thread)
                if not self._threads:
                    raise

    def _serve_all(self, generation: int) -> None:
        try:
            while batch := self._next_batch(generation):
                self._serve(batch)
                # An idle thread must keep no request alive.
                del batch
        except BaseException as error:
            self._fail_queue(error)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Remove this thread from the list, and let another thread serve the queue."""
        try:
            with self.lock:
                self._threads.discard(threading.current_thread())
                if len(self.queue):
                    self._staff()
        except EngineError as error:
            self._fail_queue(error)
        if self._unattended and not self._threads:
            self._timers.stop(0)

    def _next_batch(self, generation: int) -> list[QueuedCall]:
        """Return the next calls to make together, or [] to end the thread."""
        with self.lock:
            while True:
                now = self.clock()
                # A thread of an earlier generation ends and leaves the queue to its successor.
                ended = generation != self._generation
                batch = [] if ended else self.in_flight.take(now)
                if batch:
                    self._room.notify_all()
                    if len(self.queue) and self._workers > 1:
                        self._staff()
                        self._work.notify()
                    return batch
                if ended or (self.closed and not len(self.queue)):
                    return []
                self._idle += 1
                try:
                    arrivals = self.queue.arrivals
                    # Requests may come after the time is over and before this thread has the lock again.
                    if not self._work.wait(self.queue.wait(now)) and self.queue.arrivals == arrivals:
                        # The time has passed even if a test's clock stands still.
                        self.queue.lose_patience()
                finally:
                    self._idle -= 1

    def _serve(self, batch: list[QueuedCall]) -> None:
        try:
            if batch[0].prepared is None:
                self._give_turn(batch[0])
            else:
                for call, result in bisect(batch, self._ask, self.engine.health, QueuedCall.delivered):
                    self._answer(call, result)
        except BaseException as error:
            # Even a SystemExit raised by the engine becomes the requests' error and does not end the thread.
            for call in batch:
                self._answer(call, failure(error, self.engine.name))
        finally:
            with self.lock:
                self.in_flight.remove(batch)
                # The engine has room again.
                self._work.notify()

    def _ask(self, calls: Sequence[QueuedCall]) -> list[Result]:
        # Requests whose callers have left in the meantime are not sent.
        there = [call for call in calls if not call.future.done()]
        if not there:
            return [BackendClosedError("the caller has cancelled this request")] * len(calls)
        with self.lock:
            self.batches += 1
        prepared = [call.prepared for call in there if call.prepared is not None]
        started = self.clock()

        def attended() -> bool:
            return not all(call.future.done() for call in there)

        # Requests that share a call were made under equal modes.
        with there[0].modes:
            results = dict(zip(there, ask_together(prepared, self.left(there), attended), strict=True))
        with self.lock:
            now = self.clock()
            self.queue.came_back(there, now - started, now)
        return [results.get(call, BackendClosedError("the caller has cancelled this request")) for call in calls]

    def _answer(self, call: QueuedCall, result: Result) -> None:
        call.answered = True
        if isinstance(result, Exception):
            settle(call.future, error=own(failure(result, self.engine.name)))
        else:
            settle(call.future, result)

    def _give_turn(self, call: QueuedCall) -> None:
        call.answered = True
        if settle(call.future):
            call.released.get()

    def _fail_queue(self, error: BaseException) -> None:
        with self.lock:
            calls = self.queue.clear()
            self._notify_all()
        for call in calls:
            settle(call.future, error=own(failure(error, self.engine.name)))

    # Requests that are settled by others -----------------------------------------------------------------------------

    def _gone(self, future: Future[Any]) -> None:
        """Clean up after a future that a worker, its timer, or its caller (by cancelling it) has settled."""
        uninterrupted(partial(self._clean_up, future))

    def _clean_up(self, future: Future[Any]) -> None:
        # In a fork, a thread that is not there may hold the lock for ever.
        if not self.engine.elsewhere:
            self._forget(future)
        if future.cancelled():
            # Otherwise concurrent.futures.wait would go on waiting for it.
            future.set_running_or_notify_cancel()

    def _forget(self, future: Future[Any]) -> None:
        with self.lock:
            call = self.pending.pop(future)
            self.settled += 1
            if call.timer is not None:
                self._timers.cancel(call.timer)
            if self.queue.remove(call):
                self._notify_all()
            elif call in self.in_flight and not call.answered:
                self._abort(call)

    def _abort(self, call: QueuedCall) -> None:
        if call.prepared is not None and self.engine.capabilities.abort:
            self._aborts.add(call.prepared.request.request_ids, lambda: not call.answered)

    def _wait_for_room(self, call: QueuedCall) -> None:
        try:
            with self.lock:
                while call.number in self.queue.outside:
                    self._room.wait(NOTICE)
        except BaseException:
            uninterrupted(call.future.cancel)
            raise

    def _notify_all(self) -> None:
        with self.lock:
            self._work.notify_all()
            self._room.notify_all()
