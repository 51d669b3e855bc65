"""When a request over HTTP is sent again, and how that is logged."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import tenacity

from corelm.errors import brief
from corelm_engine_kit.http_errors import TransientError
from corelm_engine_kit.redaction import Secrets

_log = logging.getLogger(__name__)

#: Seconds before each retry: 0.5, 1, 2, … plus up to half a second at random, so that rows do not all return at once.
_BACKOFF = tenacity.wait_exponential(multiplier=0.5, max=15.0) + tenacity.wait_random(0.0, 0.5)


def retrying(max_retries: int, secrets: Secrets, sleep: Callable[[float], Awaitable[None]]) -> tenacity.AsyncRetrying:
    """Return what sends a request again after each `TransientError`. The last one is raised.

    Args:
        max_retries: how often.
        secrets: what the log must not repeat.
        sleep: waits between two tries.
    """
    return tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(max_retries + 1),
        wait=lambda state: max(_BACKOFF(state), _failed_with(state).retry_after),
        retry=tenacity.retry_if_exception_type(TransientError),
        before_sleep=partial(_log_retry, secrets),
        sleep=sleep,
        reraise=True,
    )


def _failed_with(state: tenacity.RetryCallState) -> TransientError:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, TransientError)
    return error


def _log_retry(secrets: Secrets, state: tenacity.RetryCallState) -> None:
    failure = brief(secrets.masked(str(_failed_with(state))))
    _log.warning("%s; trying again in %.1f s", failure, state.upcoming_sleep)
