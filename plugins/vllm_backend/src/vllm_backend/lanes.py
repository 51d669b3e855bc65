"""`Lanes`: keeps two kinds of calls apart that must not run in vLLM at the same time.

If one request of a step names the ids whose log-probs it wants, as scoring does, vLLM's V1 model runner returns no most
probable ids for the other requests of this step (seen with vLLM 0.32).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Literal

from corelm.spec import GenerateRequest, ScoreRequest
from corelm.support import Deadline

#: ``top``: answers with their most probable ids. ``named``: scores of ids that the request names.
Lane = Literal["top", "named"]


def lane_of(request: GenerateRequest | ScoreRequest) -> Lane | None:
    """Return which kind of call a request makes; None for one that may run beside both."""
    if isinstance(request, ScoreRequest):
        return None if request.top_k else "named"
    return "top" if request.top_logprobs else None


class Lanes:
    """Any number of calls of one kind, or of the other. They are let in by the order in which they have come."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._running: dict[Lane, int] = {"top": 0, "named": 0}
        self._waiting: deque[object] = deque()

    @contextmanager
    def entered(self, lane: Lane | None, timeout: float | None) -> Iterator[float | None]:
        """Run the ``with`` block while no call of the other kind runs, and hand it the seconds that are left.

        Args:
            lane: the kind of the call; None for one that is let in at once.
            timeout: seconds to wait; None for no limit.

        Raises:
            TimeoutError: calls of the other kind have run all the time.
        """
        if lane is None:
            yield timeout
            return
        other: Lane = "named" if lane == "top" else "top"
        place, deadline = object(), Deadline(timeout)
        with self._changed:
            self._waiting.append(place)
            try:
                while self._waiting[0] is not place or self._running[other]:
                    self._changed.wait(deadline.left())
                    timeout = deadline.left()
                self._running[lane] += 1
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()
        try:
            yield timeout
        finally:
            with self._changed:
                self._running[lane] -= 1
                self._changed.notify_all()
