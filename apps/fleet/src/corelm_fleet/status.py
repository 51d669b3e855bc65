"""`ReplicaStatus`: one line of the table that shows how a fleet is doing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

#: Seconds over which throughput is averaged.
_WINDOW = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """How a replica is doing.

    Attributes:
        name: its name.
        state: its state, such as "healthy"; see `corelm_fleet.records.State`.
        epoch: the weights that it has: 0 are those that it is started with; None if that is not known.
        rows: rows that it works on.
        tokens_per_second: tokens that it has sampled in answers of the last minute, per second.
        starts: how often it was started. 1 is the first.
        why: why it last stopped serving; "" if it never has.
    """

    name: str
    state: str
    epoch: int | None
    rows: int
    tokens_per_second: float
    starts: int
    why: str


class Throughput:
    """Counts the tokens of the last minute.

    Args:
        now: the time in seconds.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, tokens: int, now: float) -> None:
        """Count tokens."""
        self._counts.append((now, tokens))
        self.per_second(now)

    def per_second(self, now: float) -> float:
        """Return the tokens per second."""
        while self._counts and self._counts[0][0] < now - _WINDOW:
            self._counts.popleft()
        span = min(_WINDOW, now - self._since)
        return sum(count for _, count in self._counts) / max(span, 1.0)
