"""`Lanes`: keeps two kinds of calls apart that must not run in vLLM at the same time.

If one request of a step names the ids whose log-probs it wants, as scoring does, vLLM's V1 model runner returns no most
probable ids for the other requests of this step (seen with vLLM 0.32).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition
from typing import Literal

from corelm.spec import Deadline, GenerateRequest, ScoreRequest

#: ``top``: answers with their most probable ids. ``named``: scores of ids that the request names.
Lane = Literal["top", "named"]


def lane_of(request: GenerateRequest | ScoreRequest) -> Lane | None:
    """Return which kind of call a request makes; None for one that may run beside both."""
    if isinstance(request, ScoreRequest):
        return None if request.top_k else "named"
    return "top" if request.top_logprobs else None


def together(count: int, alone: bool) -> list[slice]:
    """Return which of so many rows to run at a time: all of them, or each one alone."""
    step = 1 if alone else max(1, count)
    return [slice(start, start + step) for start in range(0, count, step)]


@dataclass(eq=False)
class Turn:
    """A call that waits for its turn, or has it.

    Attributes:
        names: the names of its requests.
        timeout: the seconds that it has left when its turn comes, or None.
        aborted: those of its names that were aborted while it waited.
    """

    names: frozenset[str]
    timeout: float | None
    aborted: set[str] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Whether all of its requests were aborted."""
        return bool(self.names) and self.names <= self.aborted


class Lanes:
    """Any number of calls of one kind, or of the other. They are let in by the order in which they have come."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._running: dict[Lane, int] = {"top": 0, "named": 0}
        self._waiting: deque[Turn] = deque()

    def abort(self, names: Iterable[str]) -> None:
        """Have the calls that wait leave out the requests with these names. The engine does not know of them yet."""
        with self._changed:
            for turn in self._waiting:
                turn.aborted |= turn.names.intersection(names)
            self._changed.notify_all()

    @contextmanager
    def entered(self, lane: Lane | None, timeout: float | None, names: Iterable[str] = ()) -> Iterator[Turn]:
        """Run the ``with`` block while no call of the other kind runs, or once all requests of the call were aborted.

        Args:
            lane: the kind of the call; None for one that is let in at once.
            timeout: seconds to wait; None for no limit.
            names: the names of the requests of the call.

        Raises:
            TimeoutError: calls of the other kind have run all the time.
        """
        turn = Turn(frozenset(names), timeout)
        if lane is None:
            yield turn
            return
        other: Lane = "named" if lane == "top" else "top"
        deadline = Deadline(timeout)
        with self._changed:
            self._waiting.append(turn)
            try:
                while not turn.is_over and (self._waiting[0] is not turn or self._running[other]):
                    self._changed.wait(deadline.left())
                    turn.timeout = deadline.left()
                # A call of which nothing is left does not keep others waiting.
                runs = not turn.is_over
                self._running[lane] += runs
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
        try:
            yield turn
        finally:
            with self._changed:
                self._running[lane] -= runs
                self._changed.notify_all()
