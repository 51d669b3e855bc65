"""The end of the program: calls under way are ended before Python is taken down.

A daemon thread that is inside an engine can crash an interpreter that is being taken down, for example with "terminate
called without an active exception". So such threads are awaited, and requests that the engine can abort are aborted.
"""

from __future__ import annotations

import atexit

# Imported before the registration below: what is registered first is called last, and this module then waits for the
# worker threads of every pool. They may be waiting for calls that have to be ended first.
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

F = TypeVar("F", bound=Callable[[], object])

#: Seconds that an ending program waits for calls that no caller waits for; and after Ctrl-C.
PATIENCE, PATIENCE_AFTER_INTERRUPT = 5.0, 1.0

_endings: list[Callable[[], object]] = []


def at_program_end(function: F) -> F:
    """Have the function called when the program ends; functions registered later are called first.

    It is called when all other threads but daemons have ended. After Ctrl-C it is also called before they are awaited,
    because they may wait for calls that it ends. Ctrl-C while it runs ends the process at once.
    """
    _endings.append(function)

    @atexit.register
    def call() -> None:
        try:
            function()
        except KeyboardInterrupt:
            end_as_interrupted()

    return function


def interrupted() -> bool:
    """Return whether the program ends because of a `KeyboardInterrupt` that nothing caught."""
    # At a prompt, which sets `sys.ps1`, an interrupt ends a statement and not the program.
    return isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) and not hasattr(sys, "ps1")


def patience() -> float:
    """Return how many seconds an ending program waits for calls that no caller waits for."""
    return PATIENCE_AFTER_INTERRUPT if interrupted() else PATIENCE


def end_as_interrupted() -> None:
    """End the process as Python does after an uncaught `KeyboardInterrupt`: by the signal. A shell calls this 130."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


@atexit.register
def _say_again_that_it_was_interrupted() -> None:
    """Have Python end the process by the signal, also if a thread ran `exec` or `eval` after the interrupt.

    Python decides by a flag that an uncaught `KeyboardInterrupt` sets, and that each of these calls clears if it gets a
    str: a library that makes a dataclass or a named tuple is enough. Only such a call can set the flag again.
    """
    if interrupted():
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _before_threads_are_awaited() -> None:
    if interrupted():
        try:
            for function in reversed(_endings):
                function()
        except KeyboardInterrupt:
            end_as_interrupted()


# Python offers no public way to be called before the other threads are awaited; `concurrent.futures` uses this one too.
# If a later release drops it, the program waits for its threads first.
getattr(threading, "_register_atexit", lambda function: None)(_before_threads_are_awaited)
