"""Interrupt a call at every point at which CPython can raise a `KeyboardInterrupt` in it."""

import inspect
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import corelm

#: Where an interrupt can leave a lock of ours or of a future locked.
_FILES = (str(Path(corelm.__file__).parent), threading.__file__, queue.__file__, inspect.getfile(Future))


def interrupt_everywhere(call: Callable[[], Any], step: int = 1) -> Iterator[int]:
    """Make the call again and again. Interrupt it at its first point, then at the second, until it ends by itself.

    CPython checks for signals where a Python function starts and after a C function has returned. Yields the number of
    the point after each interrupt, so that the test can look at what the call has left behind.

    Args:
        step: interrupt only at every so many points.
    """
    number = 1
    while _interrupted(call, number):
        yield number
        number += step


def _in_finalizer(frame: Any) -> bool:
    """Return whether Python would print an exception that is raised here and ignore it."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _interrupted(call: Callable[[], Any], number: int) -> bool:
    seen = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        counts = event in ("call", "c_return") and frame.f_code.co_filename.startswith(_FILES)
        seen += counts
        if counts and seen == number and not _in_finalizer(frame):
            # Python also ends the profiling.
            raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return seen >= number
