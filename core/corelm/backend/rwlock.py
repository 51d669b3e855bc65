"""`ReadersWriterLock`: many visits hold it together (shared), or one alone (exclusive)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

#: Seconds between two calls of `remind`.
REMINDER = 0.1
#: Seconds after which a waiting thread looks again even if it was not woken: the thread that should have woken it may
#: have been interrupted.
LOOK_AGAIN = 0.25


class WouldDeadlock(RuntimeError):
    """Two holders wait for each other to release the lock."""


class Visit:
    """One use of the lock.

    Attributes:
        exclusive: whether it holds the lock alone.
        hook: the hook that is called in it.
        outer: the visit in which it is made; None for one that is made outside every other.
        names: the requests that are made in it.
        beside: the hooks whose visits it does not wait for, although it is exclusive.
        entered: whether it has held the lock.
        left: whether its caller has stopped waiting for it.
    """

    __slots__ = ("_attended", "beside", "entered", "exclusive", "hook", "left", "names", "outer")

    def __init__(
        self,
        exclusive: bool,
        outer: Visit | None,
        hook: str,
        names: Iterable[str],
        attended: Callable[[], bool] | None,
        beside: Iterable[str] = (),
    ) -> None:
        self.beside: frozenset[str] = frozenset(beside) | (outer.beside if outer is not None else frozenset())
        self.exclusive, self.outer, self._attended = exclusive, outer, attended
        self.hook, self.names = hook, tuple(names)
        self.entered = self.left = False

    @property
    def abandoned(self) -> bool:
        """Whether no caller waits for it any more."""
        return self.left or (self._attended is not None and not self._attended())

    def enclosing(self) -> set[Visit]:
        """Return the visits in which this one is made."""
        found, visit = set[Visit](), self.outer
        while visit is not None:
            found.add(visit)
            visit = visit.outer
        return found


class ReadersWriterLock:
    """A lock that is held shared or exclusive.

    A thread that waits for exclusive access goes before threads that later ask for shared access, so it never starves.
    A visit may be made inside another one, in either mode.

    An interrupt, such as a `KeyboardInterrupt`, can be raised between any two bytecodes of the main thread. It must
    never leave the lock held. So `hold` takes a function: the ``__exit__`` of a context manager is interrupted before
    it has done anything. The lock is held by the visits in `inside`, which one C call each adds and removes. Everything
    else is only there to wake the waiting threads sooner.

    Attributes:
        inside: the visits that hold the lock.
    """

    def __init__(self) -> None:
        self.inside: dict[Visit, None] = {}
        self._waiting: dict[Visit, SimpleQueue[None]] = {}
        # A lock in C: its `with` statement cannot be interrupted half-way. Reentrant, because a signal handler and a
        # finalizer may call this on a thread that is in here.
        self._mutex = threading.RLock()
        self._local = threading.local()

    def visit(
        self,
        *,
        exclusive: bool,
        hook: str = "",
        names: Iterable[str] = (),
        attended: Callable[[], bool] | None = None,
        beside: Iterable[str] = (),
    ) -> Visit:
        """Return a new visit for `hold`, inside the one that this thread is in.

        Args:
            exclusive: whether it holds the lock alone.
            hook: the hook that is called in it.
            names: the requests that are made in it.
            attended: returns whether a caller waits for it; None if one does as long as `left` is not set.
            beside: hooks whose visits it does not wait for. The same holds for the visits made inside it. What is not
                inside yet waits for it as for any other.
        """
        outer = getattr(self._local, "visit", None)
        while outer is not None and outer not in self.inside:
            # Left over from an interrupt.
            outer = outer.outer
        return Visit(exclusive, outer, hook, names, attended, beside)

    def hold(
        self,
        visit: Visit,
        function: Callable[[], T],
        timeout: float | None = None,
        remind: Callable[[], object] | None = None,
    ) -> T:
        """Call the function while holding the lock, and return what it returns.

        Args:
            visit: a new visit. It may have been made on another thread, which waits for this one.
            timeout: seconds to wait for the lock; None waits as long as it takes.
            remind: called every `REMINDER` seconds while other visits hold the lock, to make them release it. What it
                raises ends the wait.

        Raises:
            TimeoutError: other visits held the lock for `timeout` seconds.
            WouldDeadlock: the lock is held shared around an exclusive visit, and another such visit waits already.
        """
        outside = getattr(self._local, "visit", None)
        try:
            self._enter(visit, timeout, remind)
            self._local.visit, visit.entered = visit, True
            return function()
        finally:
            self.inside.pop(visit, None)
            self._local.visit = outside
            self._wake()

    def _enter(self, visit: Visit, timeout: float | None, remind: Callable[[], object] | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        pause = LOOK_AGAIN if remind is None else REMINDER
        bell: SimpleQueue[None] = SimpleQueue()
        try:
            while True:
                with self._mutex:
                    if self._may_enter(visit):
                        self.inside[visit] = None
                        return
                    self._waiting[visit] = bell
                left = pause if end is None else min(pause, end - time.monotonic())
                if left <= 0:
                    raise TimeoutError
                try:
                    bell.get(timeout=left)
                except Empty:
                    if remind is not None:
                        remind()
        finally:
            self._waiting.pop(visit, None)

    def _may_enter(self, visit: Visit) -> bool:
        if not self.inside and not self._waiting.keys() - {visit}:
            return True
        others, nested = self._others(visit), self._nested(visit)
        # A copy, made in one step: a thread that stops waiting does not take the mutex.
        exclusive = [other for other in list(self._waiting) if other.exclusive and other is not visit]
        if not visit.exclusive:
            return not any(other.exclusive for other in others) and (nested or not exclusive)
        if others and nested and any(map(self._nested, exclusive)):
            raise WouldDeadlock
        return not others

    def _others(self, visit: Visit) -> set[Visit]:
        """Return the visits that hold the lock and that this one waits for: it is not made in them."""
        others = self.inside.keys() - visit.enclosing()
        return {each for each in others if each.hook not in visit.beside} if visit.beside else others

    def _nested(self, visit: Visit) -> bool:
        return not visit.enclosing().isdisjoint(self.inside)

    def _wake(self) -> None:
        with self._mutex:
            for visit, bell in list(self._waiting.items()):
                if not visit.exclusive:
                    bell.put(None)
                elif not self._others(visit):
                    bell.put(None)
                    return


class Patience:
    """Gives up on visits that no caller waits for. Call it again and again while others wait for them to end.

    Args:
        inside: the visits that hold the lock.
        seconds: how long to wait once no caller waits for any of them.
        abort: ends the requests of these visits.
        abort_all: whether to end those as well that a caller waits for.
    """

    def __init__(
        self,
        inside: dict[Visit, None],
        seconds: float,
        abort: Callable[[Iterable[Visit]], object],
        abort_all: bool,
    ) -> None:
        self._inside, self._seconds, self._abort, self._abort_all = inside, seconds, abort, abort_all
        self._since: float | None = None

    def __call__(self) -> None:
        """Abort what is to be ended.

        Raises:
            TimeoutError: no caller has waited for any of the visits for so many seconds.
        """
        inside = list(self._inside)
        abandoned = [visit for visit in inside if visit.abandoned]
        self._abort(inside if self._abort_all else abandoned)
        if len(abandoned) < len(inside):
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > self._seconds:
            raise TimeoutError
