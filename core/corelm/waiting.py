"""`next_item` and `done_within`: waits for another thread that Ctrl-C ends."""

from __future__ import annotations

import time
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

#: Seconds after which a wait notices an interrupt that came just before it.
NOTICE = 0.5


def next_item(queue: SimpleQueue[T], timeout: float | None = None) -> T:
    """Return the next item of the queue. Ctrl-C ends the wait.

    Python handles a signal between two steps of the main thread. One that comes after the last step before a wait, or
    from `_thread.interrupt_main`, does not end that wait, so no wait is long.

    Raises:
        queue.Empty: there was no item within `timeout` seconds.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = NOTICE if end is None else end - time.monotonic()
        try:
            return queue.get(timeout=min(NOTICE, max(0.0, left)))
        except Empty:
            if end is not None and left <= NOTICE:
                raise


def done_within(future: Future[Any], timeout: float | None = None) -> bool:
    """Wait for the future. Return whether it is done within `timeout` seconds. Ctrl-C ends the wait."""
    done: SimpleQueue[object] = SimpleQueue()
    future.add_done_callback(done.put)
    try:
        next_item(done, timeout)
    except Empty:
        return False
    return True
