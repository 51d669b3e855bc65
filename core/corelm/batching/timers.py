"""`Timers`: a thread that calls functions at given times.

asyncio's ``call_later`` would be shorter, but an event loop reads its own clock. The batcher's clock is injectable, so
that its tests move time by hand instead of sleeping: that is why this module keeps a heap.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable

from corelm.backend.futures import start
from corelm.errors import brief, described
from corelm.validate import LONGEST

_log = logging.getLogger(__name__)


class Timer:
    """A function and the time to call it. Timers are ordered by time, then by age, as a heap needs it."""

    __slots__ = ("end", "function", "number")

    def __init__(self, end: float, number: int, function: Callable[[], object]) -> None:
        self.end, self.number = end, number
        self.function: Callable[[], object] | None = function

    def __lt__(self, other: Timer) -> bool:
        return (self.end, self.number) < (other.end, other.number)


class Timers:
    """Calls functions at given times, on one thread that starts with the first timer.

    Functions should not take long. What they raise is logged and ends no thread.

    Args:
        clock: returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # `with` on the lock itself cannot be interrupted half-way; on the condition it can.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._heap: list[Timer] = []
        self._cancelled = 0
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    @property
    def thread(self) -> threading.Thread | None:
        return self._thread

    def call_at(self, end: float, function: Callable[[], object]) -> Timer:
        """Call `function` at the time `end`.

        Raises:
            EngineError: the system has no room for the thread.
        """
        with self._mutex:
            if self._thread is None or not self._thread.is_alive():
                # It is not alive if the clock failed, and in a fork of its process.
                self._thread = threading.Thread(target=self._run, name="corelm-timers", daemon=True)
                try:
                    start(self._thread, "a timeout")
                except BaseException:
                    self._thread = None
                    raise
            timer = Timer(end, next(self._numbers), function)
            heapq.heappush(self._heap, timer)
            if self._heap[0] is timer:
                self._changed.notify()
        return timer

    def cancel(self, timer: Timer) -> None:
        """Forget a timer. A timer that has gone off is already forgotten."""
        with self._mutex:
            if timer.function is None:
                return
            timer.function = None
            self._cancelled += 1
            if self._cancelled > len(self._heap) // 2:
                self._heap = [kept for kept in self._heap if kept.function is not None]
                heapq.heapify(self._heap)
                self._cancelled = 0

    def stop(self, timeout: float | None = None) -> None:
        """Forget all timers and end the thread; the next timer starts another."""
        with self._mutex:
            self._heap, self._cancelled = [], 0
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._mutex:
                while self._thread is me and not self._due():
                    self._changed.wait(min(self._heap[0].end - self._clock(), LONGEST) if self._heap else None)
                if self._thread is not me:
                    return
                timer = heapq.heappop(self._heap)
                function, timer.function = timer.function, None
                self._cancelled -= function is None
            if function is not None:
                try:
                    function()
                except BaseException as error:
                    _log.error("a timer raised %s", brief(described(error)), exc_info=error)
            del timer, function

    def _due(self) -> bool:
        return bool(self._heap) and self._heap[0].end <= self._clock()
