"""How a failed call is repeated: as often as the user asked, and not after its timeout."""

from __future__ import annotations

import time
from collections.abc import Callable

import tenacity

from corelm.backend.call_log import log_retry
from corelm.errors import EngineError
from corelm.validate import invalid, shown


def retrying(retry: int | tenacity.BaseRetrying | None) -> tenacity.BaseRetrying | None:
    """Return what repeats a failed call: for a number of attempts, or as a tenacity `Retrying` says.

    Raises:
        InvalidRequestError: `retry` is neither.
    """
    if retry is None:
        return None
    if isinstance(retry, tenacity.Retrying):
        # Raise the last error itself instead of tenacity's wrapper of it.
        return retry.copy(reraise=True, before_sleep=retry.before_sleep or log_retry)
    if isinstance(retry, bool) or not isinstance(retry, int) or retry < 1:
        raise invalid("retry", f"expected an integer of at least 1 or a tenacity.Retrying, got {shown(retry)}")
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(retry),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=10),
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, EngineError) and error.usable is not False),
        before_sleep=log_retry,
        reraise=True,
    )


def until(end: float | None, retry: tenacity.BaseRetrying) -> tenacity.BaseRetrying:
    """Return a copy that raises the last error instead of a pause that would last until `end` or longer."""
    if end is None:
        return retry.copy()

    def stop(state: tenacity.RetryCallState) -> bool:
        return retry.stop(state) or time.monotonic() + state.upcoming_sleep >= end

    return retry.copy(stop=stop)


def unless(delivered: Callable[[], bool], retry: tenacity.BaseRetrying) -> tenacity.BaseRetrying:
    """Return a copy that repeats nothing once `delivered` returns True: a caller has been given part of the result."""
    return retry.copy(retry=tenacity.retry_all(retry.retry, lambda state: not delivered()))
