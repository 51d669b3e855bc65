"""What `concurrent.futures` leaves to its users: settling a future that others may settle, and one thread a call."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


def settle(future: Future[Any], result: Any = None, *, error: BaseException | None = None) -> bool:
    """Give the future its result or error. False if it has one, or was cancelled."""
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return False
    return True


def own(error: E) -> E:
    """A copy for one of several callers: each raises it on its own thread, which writes to it."""
    try:
        made = copy.copy(error)
    except Exception:
        # An exception class that cannot be copied.
        return error
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)


def in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Run the function on a thread of its own, which holds up no interpreter that ends.

    Cancelling the future drops the result; the function goes on.
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
