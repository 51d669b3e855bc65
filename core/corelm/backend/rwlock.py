"""`ReadersWriterLock`: many threads inside together, or one alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds between two reminders of those who are waited for.
REMINDER = 0.1


class ReadersWriterLock:
    """A thread that wants to be alone goes before those that came later and do not, so it never starves.

    A thread that is inside may enter again, in either way.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()
        self._alone: int | None = None
        self._waiting_to_be_alone = 0

    @contextmanager
    def shared(self, timeout: float | None = None) -> Iterator[None]:
        """Raises:
        TimeoutError: somebody was, or wanted to be, alone for `timeout` seconds.
        """
        me = threading.get_ident()

        def may_enter() -> bool:
            return me in self._inside or (self._alone is None and not self._waiting_to_be_alone)

        with self._changed:
            self._wait(may_enter, timeout)
            self._inside[me] += 1
        try:
            yield
        finally:
            self._leave(me)

    @contextmanager
    def exclusive(self, timeout: float | None = None, remind: Callable[[], object] | None = None) -> Iterator[None]:
        """Args:
            remind: called now and then while others are inside, to make them leave.

        Raises:
            TimeoutError: others were inside for `timeout` seconds.
        """
        me = threading.get_ident()
        with self._changed:
            self._waiting_to_be_alone += 1
            try:
                self._wait(lambda: self._alone in (None, me) and not self._inside.keys() - {me}, timeout, remind)
            finally:
                self._waiting_to_be_alone -= 1
                self._changed.notify_all()
            outer, self._alone = self._alone, me
            self._inside[me] += 1
        try:
            yield
        finally:
            self._alone = outer
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
