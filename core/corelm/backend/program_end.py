"""The end of the program: calls under way are ended before Python is taken down.

A daemon thread that is inside an engine can crash an interpreter that is being taken down, for example with "terminate
called without an active exception". So such threads are awaited, and requests that the engine can abort are aborted.
"""

from __future__ import annotations

import atexit

# Imported before the registration below: what is registered first is called last, and this module then waits
# for the worker threads of every pool. They may be waiting for calls that have to be ended first.
import concurrent.futures.thread  # noqa: F401
import gc
import io
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TypeVar

F = TypeVar("F", bound=Callable[[], object])

#: Seconds that an ending program waits for calls that no caller waits for; and after Ctrl-C, once.
GRACE_PERIOD, GRACE_AFTER_INTERRUPT = 5.0, 1.0

_endings: list[Callable[[], object]] = []


def at_program_end(function: F) -> F:
    """Have the function called when the program ends; functions registered later are called first.

    It is called when all other threads but daemons have ended. After Ctrl-C it is also called before they are
    awaited, because they may wait for calls that it ends. Ctrl-C while it runs ends the process at once.
    """
    _endings.append(function)
    return function


def interrupted() -> bool:
    """Return whether the program ends because of a `KeyboardInterrupt` that nothing caught."""
    # At a prompt, which sets `sys.ps1`, an interrupt ends a statement and not the program.
    return isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) and not hasattr(sys, "ps1")


@cache
def program_deadline() -> float:
    """Return when an ending program stops waiting for calls, in the seconds of `time.monotonic`.

    All that wait share it, so that what waits later does not add to the time. It starts with the first of them.
    """
    return time.monotonic() + (GRACE_AFTER_INTERRUPT if interrupted() else GRACE_PERIOD)


def end_as_interrupted() -> None:
    """End the process as Python does after an uncaught `KeyboardInterrupt`: by the signal. A shell calls this 130.

    Files that are open keep what was written to them. Nothing else is called.
    """
    # First, so that Ctrl-C ends the process at once if a file cannot be written.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    flush_files()
    signal.raise_signal(signal.SIGINT)


def flush_files() -> None:
    """Write what Python's open files have buffered, as far as they can be written."""
    # Of the type and not of the object: a proxy may say that it is a file, or fail when it is asked.
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    for stream in (sys.stdout, sys.stderr, *files):
        with suppress(Exception):
            stream.flush()


def end_stuck() -> None:
    """End the process after Ctrl-C, because a call does not end, and threads that Python waits for may wait for it."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        end_as_interrupted()


@atexit.register
def _at_exit() -> None:
    _call_endings()
    if interrupted() and any(thread.daemon for thread in threading.enumerate()):
        # A daemon thread that leaves an engine can crash Python while it is taken down.
        end_as_interrupted()


def _before_threads_are_awaited() -> None:
    if interrupted():
        _call_endings()


def _call_endings() -> None:
    try:
        for function in reversed(_endings):
            function()
    except KeyboardInterrupt:
        end_as_interrupted()


# Python offers no public way to be called before the other threads are awaited; `concurrent.futures` uses
# this one too. If a later release drops it, the program waits for its threads first.
getattr(threading, "_register_atexit", lambda function: None)(_before_threads_are_awaited)
