"""`QueuedCall`: a request in the queue of a batcher, and the time it has left."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from corelm.backend.futures import settle
from corelm.backend.prepared_call import PreparedCall
from corelm.batching.scheduling import Ticket
from corelm.batching.timers import Timer
from corelm.errors import BackendTimeoutError, CoreLMError, EngineError, described
from corelm.tensors.modes import CallerModes

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedCall(Ticket):
    """A request on its way to the engine, or a caller's turn to use the engine on the caller's own thread.

    Attributes:
        prepared: the call to make; None for a turn, in which the engine is the caller's until `released` has an entry.
        owner: an object that must not be garbage-collected before the request is answered.
        timeout: seconds after which the request fails, whether it is queued or in the engine; None for never.
        future: gets the result, or becomes ready when the turn has come.
        released: gets an entry from the caller at the end of a turn.
        end: the time at which the request fails; None for never.
        timer: the timer that goes off at `end`.
        answered: the engine has finished with the request.
        modes: the torch modes of the thread that made the request.
    """

    prepared: PreparedCall[Any] | None
    owner: object
    timeout: float | None = None
    future: Future[Any] = field(default_factory=Future, init=False)
    released: SimpleQueue[None] = field(default_factory=SimpleQueue, init=False)
    end: float | None = field(default=None, init=False)
    timer: Timer | None = field(default=None, init=False)
    answered: bool = field(default=False, init=False)
    modes: CallerModes = field(default_factory=CallerModes)

    def expire(self, name: str) -> None:
        """Fail the request, because its timeout has passed, unless it has an answer.

        Args:
            name: the name of the backend.
        """
        late = BackendTimeoutError(f"backend {name!r}: the timeout passed before the engine answered")
        if settle(self.future, error=late):
            _log.info("%s: a request timed out after %.3g s in the batcher or the engine", name, self.timeout)

    def delivered(self) -> bool:
        """Return whether the caller has been given tokens before the result."""
        return self.prepared is not None and self.prepared.delivery is not None and self.prepared.delivery.started


def time_left(calls: Iterable[QueuedCall], now: float, name: str) -> float | None:
    """Return the seconds until the last of these calls times out; None for never.

    Args:
        calls: the calls to make together.
        now: the time.
        name: the name of the backend.

    Raises:
        BackendTimeoutError: all of them have timed out.
    """
    latest = 0.0
    for call in calls:
        if call.end is None:
            return None
        latest = max(latest, call.end)
    if latest <= now:
        raise BackendTimeoutError(f"backend {name!r}: the timeout passed before the engine was called")
    return latest - now


def failure(error: BaseException, name: str) -> CoreLMError:
    """Return the error for the callers of requests that a thread of the batcher has failed on.

    Args:
        error: what was raised.
        name: the name of the backend.
    """
    if isinstance(error, CoreLMError):
        return error
    made = EngineError(f"backend {name!r}: the batching thread failed with {described(error)}")
    made.__cause__ = error
    return made
