"""`Dispatcher`: takes requests from a queue to an engine. One thread, the owner, changes all state that callers share.

Callers and workers put functions into the owner's inbox. The owner calls them, fails the requests whose time is over
and hands the next batches to workers, the threads that call the engine. So the state needs no lock, and Ctrl-C, which
Python raises in the main thread, never leaves it half changed: the main thread only waits for an answer.

A dispatcher does not refer to the batcher in front of it, so an abandoned batcher is garbage-collected and
its threads end.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from corelm.backend.engine import GRACE_PERIOD, OpenEngine, PreparedCall
from corelm.backend.engine_call import Call
from corelm.backend.futures import LOOK_AGAIN, Aborts, Outcome, join, settle, start
from corelm.batching.scheduling import Ticket, TicketQueue
from corelm.errors import (
    BackendClosedError,
    BackendTimeoutError,
    CapabilityError,
    CoreLMError,
    EngineError,
    described,
    own,
)
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult, TokenChunk, fields_of_rows
from corelm.spec.sampling import SamplingParams
from corelm.tensors.modes import CallerModes
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets
from corelm.waiting import next_item

_log = logging.getLogger(__name__)
T = TypeVar("T")
Result = GenerateResult | ScoreResult | Exception


@dataclass(eq=False, slots=True, kw_only=True, weakref_slot=True)
class QueuedCall(Ticket):
    """A request on its way to the engine, or a caller's turn to use the engine on the caller's own thread.

    Attributes:
        prepared: the call to make; None for a turn.
        batcher: must not be garbage-collected before the request is answered.
        timeout: seconds after which the request fails, whether it is queued or in the engine; None for never.
        modes: the torch modes of the thread that made the request, which is the `caller`.
        answer: where the result goes; for a turn, where None says that it has come.
        end: the time at which the request fails.
        over: the caller has been given a result or an error, or has left.
    """

    prepared: PreparedCall[Any] | None
    batcher: object
    timeout: float | None = None
    modes: CallerModes = field(default_factory=CallerModes)
    caller: threading.Thread = field(default_factory=threading.current_thread, init=False)
    answer: Future[Any] | Outcome = field(default_factory=Outcome, init=False)
    end: float = field(default=math.inf, init=False)
    over: bool = field(default=False, init=False)

    def settle(self, result: Any = None, *, error: BaseException | None = None) -> bool:
        """Give the caller a result or an error. Return False if it has one already or has left."""
        if self.over:
            return False
        self.over = True
        if isinstance(self.answer, Future):
            return settle(self.answer, result, error=error)
        self.answer.put(result, error)
        return True

    def delivered(self) -> bool:
        """Return whether the caller has been given tokens before the result."""
        return self.prepared is not None and any(each.started for each in self.prepared.deliveries)


class Dispatcher:
    """Takes requests, which any thread may `submit`, to an engine, in the order of a queue.

    At most so many `workers` call the engine, threads that are started when they are needed. The `clock` returns
    seconds and never goes back. `in_flight` holds the requests in the engine, `batches` counts the calls to it so far.
    """

    def __init__(
        self, engine: OpenEngine, queue: TicketQueue[QueuedCall], workers: int, clock: Callable[[], float]
    ) -> None:
        self.engine, self.queue, self.clock = engine, queue, clock
        self.in_flight: set[QueuedCall] = set()
        self.batches = 0
        self.closed = False
        self._most_workers = workers
        # Counted here, because adding them up for each of thousands of requests takes long.
        self._rows = self._tokens = 0
        # How many batches are with the workers; the earliest time at which a request may time out.
        self._busy, self._next_end = 0, math.inf
        # Callers of `submit` that wait until their request is inside the queue. Those of `stop`, with the
        # number of the first request that they do not wait for.
        self._entering: list[tuple[QueuedCall, SimpleQueue[None]]] = []
        self._stops: list[tuple[int, SimpleQueue[None]]] = []
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._jobs: SimpleQueue[list[QueuedCall] | None] = SimpleQueue()
        self._owner: threading.Thread | None = None
        self._starting = threading.RLock()
        self._workers: set[threading.Thread] = set()
        # Threads that end or have ended.
        self._last: list[threading.Thread] = []
        self._aborts = Aborts(engine.abort, engine.name)

    # For callers -----------------------------------------------------------------------------------------------------

    def submit(self, call: QueuedCall, block: bool = True) -> Future[Any]:
        """Queue a call and return its future. With `block`, this thread may wait for room in a full queue."""
        self._require_open()
        call.answer = future = Future[Any]()
        # The future must not keep the request alive after its end.
        asked = weakref.ref(call)

        def cancelled(done: Future[Any]) -> None:
            if done.cancelled():
                if (left := asked()) is not None:
                    left.over = True
                    self._inbox.put(partial(self._leave, left))
                # Otherwise concurrent.futures.wait would go on waiting for it.
                done.set_running_or_notify_cancel()

        future.add_done_callback(cancelled)
        leave, room = partial(self._leave, call), SimpleQueue[None]()
        try:
            self._by_owner(partial(self._add, call, self.clock(), room))
            if block and not self.mine:
                next_item(room)
        except BaseException:
            call.over = True
            self._inbox.put(leave)
            raise
        return future

    def ask(self, call: QueuedCall) -> Any:
        """Queue a call, wait for its answer and return it. If the wait is interrupted, the call is cancelled."""
        self._require_open()
        answer = call.answer = Outcome()
        leave = partial(self._leave, call)
        try:
            self._post(partial(self._try_to_add, call, self.clock()))
            return answer.get()
        except BaseException:
            if not call.over:
                call.over = True
                self._inbox.put(leave)
            raise

    def in_turn(self, call: QueuedCall, function: Callable[[], T]) -> T:
        """Wait for this thread's turn in the queue, and call the function while the engine is this thread's."""
        if self.mine:
            return function()
        end = partial(self._remove, [call])
        try:
            self.ask(call)
            return function()
        finally:
            self._inbox.put(end)

    @property
    def mine(self) -> bool:
        """Whether this thread is one of the dispatcher's own or in the engine, and so must not wait for the queue."""
        me = threading.current_thread()
        own_thread = me in self._workers or me is self._owner or me is self._aborts.thread
        return own_thread or self.engine.entered

    def withdraw(self, wanted: Callable[[PreparedCall[Any]], bool]) -> list[QueuedCall]:
        """Remove the `wanted` calls from the queue and return them, for the caller to settle."""
        self.engine.require_here()

        def remove() -> list[QueuedCall]:
            found = [call for call in self.queue if call.prepared is not None and wanted(call.prepared)]
            for call in found:
                self.queue.remove(call)
            return found

        return self.read(remove)

    def read(self, function: Callable[[], T]) -> T:
        """Return what the function returns between two changes of the state."""
        # Without an owner there are no requests, and nothing changes.
        return function() if self._owner is None else self._by_owner(function)

    def left(self, calls: Iterable[QueuedCall]) -> float | None:
        """Return the seconds until the last of these calls times out, None for never; raise if all have."""
        left = max(call.end for call in calls) - self.clock()
        if left <= 0:
            raise BackendTimeoutError(f"backend {self.engine.name!r}: the timeout passed before the engine was called")
        return None if left == math.inf else left

    def threads(self) -> list[threading.Thread]:
        return [*filter(None, [self._owner, self._aborts.thread]), *list(self._workers)]

    def daemons(self) -> set[threading.Thread]:
        """Return the daemon threads that wait for an answer."""
        return {call.caller for call in (*list(self.in_flight), *self.queue) if call.caller.daemon}

    # Ending ----------------------------------------------------------------------------------------------------------

    def stop(self, *, flush: bool, final: bool, grace: float = GRACE_PERIOD) -> bool:
        """Answer or refuse the waiting requests and end the threads. Return whether all have ended. A fork ends none.

        See `DynamicBatcher.close` for `flush`. With `final`, later requests are refused. Without, they get new
        threads, and none ends while there are such requests. Calls that no caller waits for get `grace` seconds
        in all, and their threads then end with them.
        """
        stopped = self.begin_stop(flush=flush, final=final)
        if self.engine.elsewhere or self.mine:
            # A request's callback waits for nothing. The threads end once the queue is empty.
            return True
        end = time.monotonic() + grace
        while stopped is not None:
            left = end - time.monotonic()
            with suppress(Empty):
                next_item(stopped, max(0.0, min(left, LOOK_AGAIN)))
                break
            calls = (*list(self.in_flight), *self.queue)
            if (flush or not final) and any(call.prepared is None or not call.over for call in calls):
                end = time.monotonic() + grace
            elif left <= 0:
                break
        if final and not flush:
            why = "the batcher was closed before the engine had finished this request; open the backend again"
            for call in list(self.in_flight):
                call.settle(error=BackendClosedError(f"{why} with get_backend"))
        join(filter(None, [*self._last, self._aborts.thread]), end - time.monotonic())
        return not self.threads()

    def begin_stop(self, *, flush: bool, final: bool) -> SimpleQueue[None] | None:
        """Do the part of `stop` that waits for nothing. Return a queue that gets an item when the requests are over."""
        self.closed |= final
        if self._owner is None or self.engine.elsewhere:
            return None
        stopped = SimpleQueue[None]()
        advice = "open the backend again with get_backend" if final else "send it again"
        self._post(partial(self._stop, flush, advice, stopped))
        return stopped

    def _stop(self, flush: bool, advice: str, stopped: SimpleQueue[None]) -> None:
        if not flush:
            why = f"the batcher was stopped before this request reached the engine; {advice}"
            for call in self.queue.clear():
                call.settle(error=BackendClosedError(why))
            for call in self.in_flight:
                self._abort(call)
        self._stops.append((self.queue.flush(), stopped))

    def abandon(self) -> None:
        """End without waiting, as no caller is left. The garbage collector may call this at any point of any code."""
        self.closed = True
        self._inbox.put(int)

    # The owner -------------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        self.engine.require_here()
        if self.closed:
            raise BackendClosedError("this batcher is closed; open the backend again with get_backend")

    def _post(self, function: Callable[[], object]) -> None:
        """Have the owner call the function soon. Raise an `EngineError` if the system has no room for its thread."""
        self._inbox.put(function)
        if self._owner is None:
            with self._starting:
                # An owner that has ended since may have called the function.
                if self._owner is None and not self._inbox.empty():
                    thread = threading.Thread(target=self._own, name=f"corelm-{self.engine.name}-queue", daemon=True)
                    self._owner = thread
                    try:
                        start(thread, "the batcher")
                    except EngineError:
                        self._owner = None
                        raise

    def _by_owner(self, function: Callable[[], T]) -> T:
        if threading.current_thread() is self._owner:
            return function()
        outcome = Outcome()
        self._post(partial(outcome.of, function))
        result: T = outcome.get()
        return result

    def _own(self) -> None:
        pause: float | None = None
        while True:
            try:
                with suppress(Empty):
                    self._inbox.get(timeout=pause)()
                    while True:
                        self._inbox.get_nowait()()
                pause = self._look()
            except BaseException as error:
                # No caller may wait for an owner that is gone.
                pause = None
                for call in self.queue.clear():
                    call.settle(error=own(self._failure(error)))
            if self._ended():
                with self._starting:
                    self._owner = None
                    if self._inbox.empty():
                        return
                    self._owner = threading.current_thread()

    def _look(self) -> float | None:
        """Do what is due. Return the seconds until something may be due again; None for never."""
        now = self.clock()
        if now >= self._next_end:
            self._fail_late(now)
        while batch := self._take(now):
            if batch[0].prepared is None:
                # The engine is its caller's, until the caller removes it.
                batch[0].settle()
            else:
                self._hand_to_worker(batch)
        outside = {*self.queue.outside} if self._entering else ()
        for entry in [entry for entry in self._entering if entry[0] not in outside]:
            self._entering.remove(entry)
            entry[1].put(None)
        pauses = [self._next_end - now]
        if not self.in_flight and (wait := self.queue.wait(now)) is not None:
            pauses.append(wait)
        return None if min(pauses) == math.inf else max(0.0, min(pauses))

    def _add(self, call: QueuedCall, now: float, room: SimpleQueue[None] | None = None) -> None:
        if call.over:
            return
        self._require_open()
        self.queue.require_room()
        if call.timeout is not None:
            call.end = now + call.timeout
            self._next_end = min(self._next_end, call.end)
        self.queue.add(call, now)
        if room is not None:
            self._entering.append((call, room))

    def _try_to_add(self, call: QueuedCall, now: float) -> None:
        try:
            self._add(call, now)
        except CoreLMError as error:
            call.settle(error=error)

    def _leave(self, call: QueuedCall) -> None:
        """Drop a request whose caller does not wait for it any more."""
        if not self.queue.remove(call):
            self._abort(call)

    def _abort(self, call: QueuedCall) -> None:
        if call in self.in_flight and call.prepared is not None and self.engine.capabilities.abort:
            self._aborts.add(call.prepared.request.request_ids, lambda: call in self.in_flight)

    def _fail_late(self, now: float) -> None:
        self._next_end = math.inf
        name = self.engine.name
        for call in [*self.queue, *self.in_flight]:
            if call.over or call.end > now:
                self._next_end = min(self._next_end, math.inf if call.over else call.end)
                continue
            late = BackendTimeoutError(f"backend {name!r}: the timeout passed before the engine answered")
            if call.settle(error=late):
                _log.info("%s: a request timed out after %.3g s in the batcher or the engine", name, call.timeout)
            self._leave(call)

    def _take(self, now: float) -> list[QueuedCall]:
        """Move the requests to send now from the queue to the engine, and return them; [] for none."""
        count = len(self.in_flight)
        if count >= self._most_workers or (count == 1 and next(iter(self.in_flight)).barrier):
            return []
        batch = self.queue.take(now, self._rows, self._tokens)
        self.in_flight.update(batch)
        self._rows += sum(call.rows for call in batch)
        self._tokens += sum(call.tokens for call in batch)
        return batch

    def _remove(self, calls: Iterable[QueuedCall]) -> None:
        for call in self.in_flight.intersection(calls):
            self.in_flight.remove(call)
            self._rows -= call.rows
            self._tokens -= call.tokens

    def _hand_to_worker(self, batch: list[QueuedCall]) -> None:
        self._busy += 1
        if self._busy > len(self._workers):
            thread = threading.Thread(target=self._work, name=f"corelm-{self.engine.name}", daemon=True)
            try:
                start(thread, "the batcher")
                self._workers.add(thread)
            except EngineError as error:
                if not self._workers:
                    self._came_back(batch, [], [])
                    self._answer([(call, error) for call in batch])
                    return
        self._jobs.put(batch)

    def _came_back(self, batch: list[QueuedCall], took: list[float], there: list[QueuedCall]) -> None:
        """Note that a worker has done with a batch.

        `took` says how long each call to the engine took; the callers of those that are `there` have not been told yet.
        """
        self._busy -= 1
        self._remove(batch)
        self.batches += len(took)
        if took and there:
            self.queue.came_back(there, took[-1], self.clock())

    def _ended(self) -> bool:
        """Tell the callers of `stop` whose requests are over. Return whether the threads end, as no request is left."""
        if not (self._stops or self.closed):
            return False
        numbers = [call.number for call in (*self.queue, *self.in_flight)]
        stopped = [stop for stop in self._stops if stop[0] < min(numbers, default=math.inf)]
        if ended := not numbers and (self.closed or bool(stopped)):
            ending = [thread for thread in self._last if thread.is_alive()]
            self._last = [*ending, threading.current_thread(), *self._workers]
            for _ in self._workers:
                self._jobs.put(None)
            self._workers = set()
        for stop in stopped:
            self._stops.remove(stop)
            stop[1].put(None)
        return ended

    # Workers ---------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._jobs.get()) is not None:
            self._serve(batch)
            # An idle thread must keep no request alive.
            del batch

    def _serve(self, batch: list[QueuedCall]) -> None:
        """Have the engine answer a batch, and tell the callers.

        A batch that fails is asked again in halves, so that a bad request is left alone with its error and the
        others are served. Nothing is asked again if the error concerns all requests alike, or if the engine is not
        healthy. A call whose caller has been given tokens is not asked again: the next answer may have others.
        """
        took, answers, parts = list[float](), list[tuple[QueuedCall, Any]](), [batch]
        try:
            while parts:
                # Others in a batch that has failed may have been answered.
                self._answer(answers)
                part = parts.pop()
                try:
                    answers += zip(part, self._ask(part, took), strict=True)
                except Exception as error:
                    split = len(part) > 1 and not _concerns_all(error) and self.engine.health()
                    again = [call for call in part if split and not call.delivered()]
                    answers += [(call, error) for call in part if call not in again]
                    # Less than the whole is asked again together: the request at fault may have left with its error.
                    middle = len(again) // 2 if len(again) == len(part) else 0
                    parts += filter(None, [again[middle:], again[:middle]])
                    if isinstance(error, EngineError) and error.usable is False:
                        answers += [(call, error) for rest in parts for call in rest]
                        parts = []
        except BaseException as error:
            # Even a SystemExit raised by the engine becomes the requests' error and does not end the thread.
            answers += [(call, error) for call in batch]
        self._post(partial(self._came_back, batch, took, [call for call in batch if not call.over]))
        self._answer(answers)

    def _ask(self, calls: Sequence[QueuedCall], took: list[float]) -> list[Result]:
        cancelled = BackendClosedError("the caller has cancelled this request")
        # Requests whose callers have left in the meantime are not sent.
        there = [call for call in calls if not call.over]
        if not there:
            return [cancelled] * len(calls)
        prepared = [call.prepared for call in there if call.prepared is not None]
        told = (self.engine.name, len(there), prepared[0].hook, sum(call.rows for call in there))
        _log.debug("%s: a batch of %d requests for %s, %d rows", *told)
        started = self.clock()
        try:
            # Requests that share a call were made under equal modes.
            with there[0].modes:
                call = prepared[0] if len(prepared) == 1 else SharedCall(prepared)
                found = self.engine.call(call, self.left(there), lambda: not all(each.over for each in there))
        finally:
            took.append(self.clock() - started)
        results: dict[QueuedCall, Result] = dict(zip(there, found if len(there) > 1 else [found], strict=True))
        return [results.get(call, cancelled) for call in calls]

    def _answer(self, answers: list[tuple[QueuedCall, Any]]) -> None:
        for call, result in answers:
            if isinstance(result, BaseException):
                call.settle(error=own(self._failure(result)))
            else:
                call.settle(result)
        answers.clear()

    def _failure(self, error: BaseException) -> CoreLMError:
        if isinstance(error, CoreLMError):
            return error
        made = EngineError(f"backend {self.engine.name!r}: the batching thread failed with {described(error)}")
        made.__cause__ = error
        return made


def _concerns_all(error: Exception) -> bool:
    if isinstance(error, EngineError):
        return error.usable is False
    return isinstance(error, (BackendClosedError, BackendTimeoutError, CapabilityError))


# Merging --------------------------------------------------------------------------------------------------------------
# The result of a shared call is checked as a whole. If it is wrong, the call has failed, and the request at fault is
# looked for.


def sharing_key(call: PreparedCall[Any], modes: CallerModes) -> Hashable | None:
    """Return a key that is equal for requests that may share a call, or None for a request that has to go alone.

    Autocast and the like change an engine's numbers, so requests that were made under different torch modes go
    apart. Seeds are given per answer, so they may differ, but answers with and without a seed go apart.
    Gradients and logits belong to one caller. A request has one adapter for all its rows. Only the engine knows
    what `engine_kwargs` mean and whether two of them are the same, so requests with `engine_kwargs` go alone.
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
    asked = (request.logprobs, request.return_support, request.top_logprobs, request.seeds is not None)
    return ("generate", modes.key, _unseeded(request.sampling), asked, request.stop_ids, request.adapter)


class SharedCall(Call):
    """One call for many."""

    def __init__(self, calls: Sequence[PreparedCall[Any]]) -> None:
        request = replace(_joined([call.request for call in calls]), timeout=None)
        super().__init__(calls[0].hook, request)
        self._calls, self.callers = calls, len(calls)
        self.origins = [each for call in calls for each in call.origins]
        self.deliveries = [each for call in calls for each in call.deliveries]

    def finish(self, result: Any) -> list[Result]:
        found: list[Result] = []
        for call, part in zip(self._calls, _parts(result, [call.rows for call in self._calls]), strict=True):
            try:
                found.append(call.finish(part))
            except Exception as error:
                # An error of this request's own rows is this request's alone.
                found.append(error)
        return found

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


def _parts(batch: Any, rows: Sequence[int]) -> list[GenerateResult | ScoreResult]:
    """Split a result into results of so many rows each, which share no storage."""
    ends = list(accumulate(rows, initial=0))
    named: dict[str, Sequence[Any]] = {}
    for name, found in fields_of_rows(batch).items():
        flat = isinstance(found, (Ragged, TokenSets))
        named[name] = found.chunks(rows) if flat else [tuple(found[start:end]) for start, end in pairwise(ends)]
    return [replace(batch, **{name: values[part] for name, values in named.items()}) for part in range(len(rows))]
