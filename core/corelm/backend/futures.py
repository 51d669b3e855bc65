"""Helpers for `concurrent.futures`: settle a future that others may settle too, and run a function on a thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


def settle(future: Future[Any], result: Any = None, *, error: BaseException | None = None) -> bool:
    """Give the future its result or error. Return False if it already has one or was cancelled."""
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return False
    return True


def own(error: E) -> E:
    """Return a copy of an error for one of several callers. Raising it writes to it, so callers cannot share one."""
    try:
        made = copy.copy(error)
    except Exception:
        # This exception class cannot be copied.
        return error
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)


def in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Run the function on a new daemon thread, which never keeps the interpreter from ending.

    Cancelling the future drops the result; the function still runs to its end.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            settle(future, function())
        except BaseException as error:
            settle(future, error=error)

    future.add_done_callback(lambda done: done.cancelled() and done.set_running_or_notify_cancel())
    threading.Thread(target=run, name=name, daemon=True).start()
    return future
