"""`Alarms`: a thread that calls functions when their time has come."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress


class Alarm:
    """Compared by time, then by age, as a heap needs it."""

    __slots__ = ("end", "function", "number")

    def __init__(self, end: float, number: int, function: Callable[[], object]) -> None:
        self.end, self.number = end, number
        self.function: Callable[[], object] | None = function

    def __lt__(self, other: Alarm) -> bool:
        return (self.end, self.number) < (other.end, other.number)


class Alarms:
    """The thread starts with the first alarm. Functions should not take long; what they raise is nobody's to see."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._heap: list[Alarm] = []
        self._silenced = 0
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    @property
    def thread(self) -> threading.Thread | None:
        return self._thread

    def set(self, end: float, function: Callable[[], object]) -> Alarm:
        """Call `function` at the time `end`."""
        with self._changed:
            alarm = Alarm(end, next(self._numbers), function)
            heapq.heappush(self._heap, alarm)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="corelm-alarms", daemon=True)
                self._thread.start()
            if self._heap[0] is alarm:
                self._changed.notify()
        return alarm

    def silence(self, alarm: Alarm) -> None:
        """Forget an alarm. One that has gone off is forgotten already."""
        with self._changed:
            if alarm.function is None:
                return
            alarm.function = None
            self._silenced += 1
            if self._silenced > len(self._heap) // 2:
                self._heap = [kept for kept in self._heap if kept.function is not None]
                heapq.heapify(self._heap)
                self._silenced = 0

    def stop(self, timeout: float | None = None) -> None:
        """Forget all alarms and end the thread; the next alarm starts another."""
        with self._changed:
            self._heap, self._silenced = [], 0
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                while self._thread is me and not self._due():
                    self._changed.wait(self._heap[0].end - self._clock() if self._heap else None)
                if self._thread is not me:
                    return
                alarm = heapq.heappop(self._heap)
                function, alarm.function = alarm.function, None
                self._silenced -= function is None
            if function is not None:
                with suppress(Exception):
                    function()
            del alarm, function

    def _due(self) -> bool:
        return bool(self._heap) and self._heap[0].end <= self._clock()
