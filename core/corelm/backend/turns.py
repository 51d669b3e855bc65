"""`EngineLock`: whose turn it is in an engine. Many calls hold it together (shared), or one alone (exclusive)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from corelm.errors import BackendTimeoutError, EngineError

#: Seconds between two calls of `remind`.
REMINDER = 0.1
#: Seconds after which a waiting thread looks again even if it was not woken: the thread that should have
#: woken it may have been interrupted.
LOOK_AGAIN = 0.25


class Turn:
    """One turn of a call: it waits for the lock, holds it, and releases it.

    Args:
        lock: the engine's. The turn is taken inside the one that this thread is in.
        exclusive: whether it holds the lock alone.
        hook: the hook that is called in it.
        request_ids: the requests that are made in it.
        caller_waits: returns whether a caller waits for its result; None if one does as long as `left` is not set.
        concurrent_with: hooks whose turns it does not wait for, although it is exclusive. The same holds for
            the turns inside it. One that does not hold the lock yet waits for it as for any other.

    Attributes:
        around: the turns in which it is taken, from the innermost to the outermost.
        caller_waits: as given.
        entered: whether it has held the lock.
        left: whether its caller has stopped waiting for it.
    """

    __slots__ = ("around", "caller_waits", "concurrent_with", "entered", "exclusive", "hook", "left", "request_ids")

    def __init__(
        self,
        lock: EngineLock,
        exclusive: bool,
        hook: str = "",
        request_ids: tuple[str, ...] = (),
        caller_waits: Callable[[], bool] | None = None,
        concurrent_with: frozenset[str] = frozenset(),
    ) -> None:
        inner: Turn | None = getattr(lock.local, "turn", None)
        # Those that do not hold the lock are left over from an interrupt.
        held = () if inner is None else tuple([each for each in (inner, *inner.around) if each in lock.holders])
        self.around: tuple[Turn, ...] = held
        self.exclusive, self.hook, self.request_ids = exclusive, hook, request_ids
        self.concurrent_with: frozenset[str] = concurrent_with | held[0].concurrent_with if held else concurrent_with
        self.caller_waits, self.entered, self.left = caller_waits, False, False

    @property
    def abandoned(self) -> bool:
        """Whether no caller waits for it any more."""
        return self.left or (self.caller_waits is not None and not self.caller_waits())


class EngineLock:
    """A lock that is held shared or exclusive.

    A thread that waits for exclusive access goes before threads that later ask for shared access, so it never
    starves. A turn may be taken inside another one, in either mode.

    An interrupt, such as a `KeyboardInterrupt`, can be raised between any two calls of the main thread. It must never
    leave the lock held. The lock is held by the turns in `holders`, which one C call each adds and removes. So who
    acquires it removes its turn in the first step of a ``finally``: a function of our own could be interrupted before
    it has done anything. Everything else is only there to wake the waiting threads sooner. `OpenEngine.call` shows how.

    Args:
        name: the name of the backend, for errors.

    Attributes:
        holders: the turns that hold the lock.
        waiting: the turns that wait for it, each with what wakes its thread.
        local: `turn` is the innermost one that a thread is in.
    """

    def __init__(self, name: str) -> None:
        self.holders: dict[Turn, None] = {}
        self.waiting: dict[Turn, SimpleQueue[None]] = {}
        self.local = threading.local()
        self._name = name
        # A lock in C: its `with` statement cannot be interrupted half-way. Reentrant, because a signal
        # handler and a finalizer may call this on a thread that is in here.
        self._mutex = threading.RLock()

    def turns(self) -> tuple[Turn, ...]:
        """Return the turns that this thread is in, from the innermost to the outermost."""
        return Turn(self, False).around

    def acquire(self, turn: Turn, timeout: float | None = None, remind: Callable[[], object] | None = None) -> None:
        """Wait until the turn holds the lock.

        Args:
            turn: a new turn. It may have been made on another thread, which waits for this one.
            timeout: seconds to wait for the lock; None waits as long as it takes.
            remind: called every `REMINDER` seconds while others hold the lock, to make them release it. What
                it raises ends the wait.

        Raises:
            BackendTimeoutError: others held the lock for `timeout` seconds.
            EngineError: the lock is held shared around an exclusive turn, and another such turn waits already.
        """
        with self._mutex:
            if not (self.holders or self.waiting):
                self.holders[turn] = None
        if turn not in self.holders:
            self._wait(turn, timeout, remind)
        self.local.turn, turn.entered = turn, True

    def wake(self) -> None:
        """Wake those of the waiting threads whose turn it may be."""
        with self._mutex:
            for turn, bell in list(self.waiting.items()):
                if not turn.exclusive:
                    bell.put(None)
                elif not self._others(turn):
                    bell.put(None)
                    return

    def busy(self) -> BackendTimeoutError:
        """Return the error of a call whose turn does not come."""
        return BackendTimeoutError(f"backend {self._name!r} was busy with other calls for the whole timeout")

    def _wait(self, turn: Turn, timeout: float | None, remind: Callable[[], object] | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        pause = LOOK_AGAIN if remind is None else REMINDER
        bell: SimpleQueue[None] = SimpleQueue()
        try:
            while True:
                with self._mutex:
                    # First, or a thread that releases the lock now would wake nobody.
                    self.waiting[turn] = bell
                    if self._may_enter(turn):
                        self.holders[turn] = None
                        return
                left = pause if end is None else min(pause, end - time.monotonic())
                if left <= 0:
                    raise self.busy()
                try:
                    bell.get(timeout=left)
                except Empty:
                    if remind is not None:
                        remind()
        finally:
            self.waiting.pop(turn, None)

    def _may_enter(self, turn: Turn) -> bool:
        others, nested = self._others(turn), self._nested(turn)
        # A copy, made in one step: a thread that stops waiting does not take the mutex.
        exclusive = [other for other in list(self.waiting) if other.exclusive and other is not turn]
        if not turn.exclusive:
            # A list and no generator: Ctrl-C while a generator that is not exhausted is closed would be lost.
            alone = [other for other in others if other.exclusive]
            return not alone and (nested or not exclusive)
        if others and nested and any(map(self._nested, exclusive)):
            raise EngineError(
                f"backend {self._name!r}: two calls under way each want to update the weights, and would wait for each "
                "other; this one is refused. Update the weights outside other calls",
                usable=True,
            )
        return not others

    def _others(self, turn: Turn) -> list[Turn]:
        """Return the holders that a turn waits for."""
        return [
            each for each in list(self.holders) if each not in turn.around and each.hook not in turn.concurrent_with
        ]

    def _nested(self, turn: Turn) -> bool:
        return not self.holders.keys().isdisjoint(turn.around)
