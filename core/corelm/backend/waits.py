"""How long corelm waits: the limit on every timeout, and a call whose caller stops waiting while it goes on."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty
from typing import Any, TypeVar

from corelm.backend.futures import Outcome, start
from corelm.backend.program_end import at_program_end, patience
from corelm.tensors.modes import in_caller_modes
from corelm.validate import positive

T = TypeVar("T")

#: The longest timeout in seconds, 23 days. Locks, sockets and event loops each refuse longer ones, at different limits.
LONGEST = 2_000_000.0

_left_behind: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def seconds(field: str, given: Any) -> float:
    """Return `given` as a number of seconds above 0 that every wait accepts. More than `LONGEST` becomes `LONGEST`."""
    return min(positive(field, given), LONGEST)


def call_for(timeout: float, function: Callable[[], T], name: str) -> T:
    """Return what the function returns, but wait for at most `timeout` seconds.

    The function runs on a new daemon thread, with the caller's context variables and torch modes. If the wait ends
    early, the function goes on, its result is dropped, and the thread ends with it.

    Raises:
        TimeoutError: the function did not return in time.
        EngineError: the system has no room for another thread.
    """
    outcome = Outcome()
    thread = threading.Thread(target=outcome.of, args=(in_caller_modes(function),), name=name, daemon=True)
    start(thread, "a call with a timeout")
    try:
        result: T = outcome.get(timeout)
    except BaseException as error:
        # If this is the function's own error, its thread is ending and costs no wait.
        _left_behind.add(thread)
        if isinstance(error, Empty):
            raise TimeoutError from None
        raise
    return result


_deadlines: list[float] = []


def program_deadline() -> float:
    """Return when an ending program stops waiting for calls, in the seconds of `time.monotonic`.

    All that wait share it, so that what waits later does not add to the time. It starts with the first of them.
    """
    if not _deadlines:
        _deadlines.append(time.monotonic() + patience())
    return _deadlines[0]


@at_program_end
def _await_left_behind() -> None:
    for thread in list(_left_behind):
        thread.join(max(0.0, program_deadline() - time.monotonic()))
