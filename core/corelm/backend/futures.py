"""Futures and threads: settle a future that others may settle too, run a function on a thread, and `Aborts`."""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any, TypeVar

from corelm.errors import EngineError, brief, described, is_interrupt, is_main_thread
from corelm.waiting import next_item

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds after which a thread that waits for another one looks whether it still has to.
LOOK_AGAIN = 0.1


def settle(future: Future[Any], result: Any = None, *, error: BaseException | None = None) -> bool:
    """Give the future its result or error. Return False if it already has one or was cancelled.

    What a callback of the future raises is logged and affects no other request, even a `SystemExit`.
    """
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return False
    except BaseException as failure:
        # concurrent.futures logs what a callback raises, but lets through what is not an Exception.
        if is_interrupt(failure):
            raise
        _log.error("a callback of a request raised %s", brief(described(failure)), exc_info=failure)
    return True


def join(threads: Iterable[threading.Thread], timeout: float) -> None:
    """Wait until the threads have ended, for at most `timeout` seconds in all."""
    end = time.monotonic() + timeout
    for thread in threads:
        while thread.is_alive() and (left := end - time.monotonic()) > 0:
            thread.join(min(LOOK_AGAIN, left))


def start(thread: threading.Thread, what: str) -> None:
    """Start a thread for `what`. An `EngineError` says that the system has no room for another; the engine is fine."""
    try:
        # An interrupt in `Thread.start` would leave a thread that never starts.
        uninterrupted(thread.start)
    except RuntimeError as error:
        raise EngineError(f"{what} needs a thread: {error}", usable=True) from error


def in_thread(function: Callable[[], T], name: str, future: Future[T] | None = None) -> Future[T]:
    """Run the function on a new daemon thread, which never keeps the interpreter from ending. Return its future.

    Cancelling the future drops the result; the function still runs to its end. A function that looks at its
    own future is given one. Errors are those of `start`.
    """
    outcome: Future[T] = Future() if future is None else future

    def run() -> None:
        try:
            settle(outcome, function())
        except BaseException as error:
            settle(outcome, error=error)

    outcome.add_done_callback(lambda done: done.cancelled() and done.set_running_or_notify_cancel())
    start(threading.Thread(target=run, name=name, daemon=True), "a submitted call")
    return outcome


def uninterrupted(function: Callable[[], T]) -> T:
    """Return what the function returns. An interrupt may end the wait for it, but not the function itself.

    Python raises a `KeyboardInterrupt` in the main thread only, between any two steps of it. State that
    several threads share must not be left half changed, so the main thread has another thread change it.
    """
    if not is_main_thread():
        return function()
    outcome = Outcome()
    try:
        _thread.start_new_thread(outcome.of, (function,))
    except RuntimeError:
        # The interpreter is ending, or the system has no room for a thread.
        return function()
    result: T = outcome.get()
    return result


class Outcome:
    """What a function on another thread returned or raised.

    Unlike a future, it has no lock that an interrupt of the thread that waits can leave locked.
    """

    def __init__(self) -> None:
        self._found: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def of(self, function: Callable[[], object]) -> None:
        """Call the function and keep what it returns or raises."""
        try:
            self.put(function())
        except BaseException as error:
            self.put(error=error)

    def put(self, result: Any = None, error: BaseException | None = None) -> None:
        """Keep a result or an error, unless there is one."""
        self._found.put((result, error))

    def get(self, timeout: float | None = None) -> Any:
        """Return what the function returned, or raise what it raised; `queue.Empty` if it has not ended in time."""
        result, error = next_item(self._found, timeout)
        try:
            if error is not None:
                raise error
            return result
        finally:
            # The error's traceback refers to this frame.
            del error


#: Seconds after which a request that is still under way is aborted again.
_ABORT_AGAIN = 0.1


class Aborts:
    """Ends requests in the engine with `abort`. While one call of it is under way, further names wait for the next.

    An abort that reaches the engine before its request does is lost, so it is repeated until the request has
    ended. The `thread` that does so is None while there are no requests.
    """

    def __init__(self, abort: Callable[[tuple[str, ...]], object], name: str) -> None:
        self._abort, self._name = abort, name
        self._lock = threading.RLock()
        self._added = threading.Event()
        self._requests: list[tuple[tuple[str, ...], Callable[[], bool]]] = []
        self.thread: threading.Thread | None = None

    def add(self, names: Iterable[str], under_way: Callable[[], bool]) -> None:
        """End the requests with these names, soon, on another thread, as long as their call is `under_way`."""
        names = tuple(names)
        _log.info("%s: aborting %d requests", self._name, len(names))
        with self._lock:
            self._requests.append((names, under_way))
            self._added.set()
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name=f"corelm-{self._name}-abort", daemon=True)
                try:
                    self.thread.start()
                except RuntimeError:
                    # The system has no room for a thread: the requests go on, and their answers are dropped.
                    self.thread, self._requests = None, []

    def _run(self) -> None:
        while True:
            with self._lock:
                self._added.clear()
                self._requests = [request for request in self._requests if request[1]()]
                requests = list(self._requests)
                if not requests:
                    self.thread = None
                    return
            names = tuple(name for each, _ in requests for name in each)
            try:
                self._abort(names)
            except BaseException as error:
                # These requests then go on, and their answers are dropped.
                _log.info("%s: aborting %d requests failed: %s", self._name, len(names), brief(described(error)))
                with self._lock:
                    self._requests = [request for request in self._requests if request not in requests]
            self._added.wait(_ABORT_AGAIN)
