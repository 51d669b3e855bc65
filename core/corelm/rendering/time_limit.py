"""`Watch`: calls that are stopped when they take too long."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

R = TypeVar("R")

#: How often the caller looks whether a call is late, in seconds.
EVERY = 0.1
#: How long a stopped call may take to end before it is stopped again, in seconds.
AGAIN = 1.0


class Stopped(Exception):
    """A call took too long."""


class _Stop(SystemExit):
    """Raised in the thread of the late call. Python reports no thread that ends by a SystemExit."""


@dataclass(slots=True)
class _Call:
    deadline: float
    stopped: bool = False


class Watch:
    """Runs work on a thread of its own and stops single calls of it that take too long.

    Python raises the exception that stops a call between two steps of Python code. So it ends every loop, but not one
    long call to C. The work has its own thread because this exception must not hit the caller's code. One thread does
    all the work: starting one for each call would take longer than most calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _Call | None = None
        self._abandoned = False

    def run(self, work: Callable[[], R]) -> R:
        """Return what `work` returns, or raise what it raises. Its calls of `call` are stopped when they are late."""
        outcome: list[tuple[Any, BaseException | None]] = []

        def target() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as error:  # raised again on the caller's thread
                outcome.append((None, error))

        run_in_context = contextvars.copy_context().run
        thread = threading.Thread(target=run_in_context, args=(target,), name="corelm-rendering", daemon=True)
        try:
            thread.start()
            while thread.is_alive():
                thread.join(EVERY)
                self._stop_if_late(thread)
        finally:
            if not outcome:
                # Ctrl-C ended the wait.
                self._abandoned = True
                self._stop_if_late(thread)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    def call(self, seconds: float, function: Callable[[], R]) -> R:
        """Return what `function` returns. To be called by the work of `run`; anywhere else nothing stops the call.

        Raises:
            Stopped: the function took longer than `seconds`.
        """
        mine = _Call(time.monotonic() + seconds)
        try:
            with self._lock:
                if self._abandoned:
                    raise _Stop
                self._current = mine
            try:
                result = function()
            finally:
                self._leave(mine)
        except _Stop:
            pass
        # A second stop may have come before this call had left.
        while self._current is mine:
            with contextlib.suppress(_Stop):
                self._leave(mine)
        if self._abandoned:
            raise _Stop
        if mine.stopped:
            raise Stopped(f"did not end within {seconds:g} seconds")
        return result

    def _leave(self, mine: _Call) -> None:
        with self._lock:
            self._current = None
        if mine.stopped:
            # If an exception has not arrived yet, it does so here, within a step or two.
            for _ in range(100):
                time.sleep(0)

    def _stop_if_late(self, thread: threading.Thread) -> None:
        """Stop the call if it is late, and later again, because the call may have caught the exception."""
        # A call cannot end while this holds the lock, so the thread lives and its number is not yet another one's.
        with self._lock:
            late = self._current
            if late is None or not (self._abandoned or time.monotonic() > late.deadline):
                return
            late.stopped, late.deadline = True, time.monotonic() + AGAIN
            assert thread.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop))
