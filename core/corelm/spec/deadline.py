"""`Deadline`: how much time a call has left. `opening_within`: the deadline of opening an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from corelm.errors import BackendTimeoutError
from corelm.validate import positive


class Deadline:
    """The end of one call, `timeout` seconds from the moment this is made; None sets no limit.

    A plugin makes one from ``request.timeout`` when a hook is called. It calls `check` between two steps of
    its own work, or passes `left` as the timeout of a call that it waits for.

    >>> now = iter([100.0, 101.5])
    >>> Deadline(2.0, clock=lambda: next(now)).left()
    0.5
    """

    def __init__(self, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout = timeout
        self._clock = clock
        self._end = None if timeout is None else clock() + timeout

    def left(self) -> float | None:
        """Return the seconds that are left, always more than 0, or None where the call has no limit.

        Raises:
            TimeoutError: the time is over. Core turns it into a `BackendTimeoutError` that names backend and hook.
        """
        if self._end is None:
            return None
        seconds = self._end - self._clock()
        if seconds <= 0:
            # What is left of a caller's timeout would be a number that the caller does not know.
            raise TimeoutError("not done within the timeout; allow more time or ask for less at once")
        return seconds

    def is_over(self) -> bool:
        """Return whether the time is over."""
        return self._end is not None and self._clock() >= self._end

    def check(self) -> None:
        """Raise a `TimeoutError` if the time is over, as `left` does."""
        self.left()


@contextmanager
def opening_within(open_timeout: float, what: str) -> Iterator[Deadline]:
    """Yield the deadline of finding out what an engine can do: `open_timeout` seconds, the option of that name.

    A `TimeoutError` that ends the block after the deadline becomes a `BackendTimeoutError` that says what was
    opened. An earlier one passes unchanged: it is about a single request.

    Raises:
        InvalidRequestError: `open_timeout` is not a number above 0.
    """
    deadline = Deadline(positive("open_timeout", open_timeout))
    try:
        yield deadline
    except TimeoutError as error:
        if not deadline.is_over():
            raise
        raise BackendTimeoutError(f"open_timeout={open_timeout:g} passed while opening {what}: {error}") from error
