"""`ReadersWriterLock`: many threads hold it together (shared), or one alone (exclusive)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds between two calls of `remind`.
REMINDER = 0.1


class ReadersWriterLock:
    """A lock that is held shared or exclusive.

    A thread that waits for exclusive access goes before threads that later ask for shared access, so it never starves.
    A thread that holds the lock may acquire it again, in either mode.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()
        self._exclusive: int | None = None
        self._waiting_for_exclusive = 0

    @contextmanager
    def shared(self, timeout: float | None = None) -> Iterator[None]:
        """Hold the lock together with other threads.

        Raises:
            TimeoutError: for `timeout` seconds, another thread held the lock exclusively or waited to.
        """
        me = threading.get_ident()

        def may_enter() -> bool:
            return me in self._inside or (self._exclusive is None and not self._waiting_for_exclusive)

        with self._changed:
            self._wait(may_enter, timeout)
            self._inside[me] += 1
        try:
            yield
        finally:
            self._leave(me)

    @contextmanager
    def exclusive(self, timeout: float | None = None, remind: Callable[[], object] | None = None) -> Iterator[None]:
        """Hold the lock alone.

        Args:
            remind: called every `REMINDER` seconds while other threads hold the lock, to make them release it.

        Raises:
            TimeoutError: other threads held the lock for `timeout` seconds.
        """
        me = threading.get_ident()
        with self._changed:
            self._waiting_for_exclusive += 1
            try:
                self._wait(lambda: self._exclusive in (None, me) and not self._inside.keys() - {me}, timeout, remind)
            finally:
                self._waiting_for_exclusive -= 1
                self._changed.notify_all()
            outer, self._exclusive = self._exclusive, me
            self._inside[me] += 1
        try:
            yield
        finally:
            self._exclusive = outer
            self._leave(me)

    def _wait(
        self, condition: Callable[[], bool], timeout: float | None, remind: Callable[[], object] | None = None
    ) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._changed.wait_for(condition, timeout if remind is None else min(REMINDER, timeout or REMINDER)):
            if remind is None or (end is not None and time.monotonic() >= end):
                raise TimeoutError
            self._changed.release()
            try:
                remind()
            finally:
                self._changed.acquire()

    def _leave(self, me: int) -> None:
        with self._changed:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
            self._changed.notify_all()
