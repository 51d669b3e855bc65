"""`Histogram`: quantiles of any number of values in bounded memory, each within 1 % of the true one."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

#: Each bucket ends at this multiple of its beginning; its middle is then within 1 % of every value in it.
_GROWTH = 1.02
_LOG = math.log(_GROWTH)
#: Values outside share the outermost buckets. There are 2,093 buckets between them.
_LEAST, _MOST = 1e-9, 1e9


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are spread.

    Attributes:
        count: how many there are.
        mean: their mean.
        least: the smallest.
        median: half of them are at most this. It and the next two are within 1 % of the true ones.
        p90: 90 % of them are at most this.
        p99: 99 % of them are at most this.
        most: the largest.
    """

    count: int
    mean: float
    least: float
    median: float
    p90: float
    p99: float
    most: float

    def to_dict(self) -> dict[str, float]:
        """Return the attributes by name."""
        return asdict(self)


class Histogram:
    """Counts values in buckets whose ends are a geometric series. Several threads need a lock around it."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._count, self._sum = 0, 0.0
        self._least, self._most = math.inf, -math.inf

    def add(self, value: float) -> None:
        """Count a value. One below 0, which a clock should not give, counts as 0."""
        value = max(0.0, value)
        bucket = math.ceil(math.log(min(max(value, _LEAST), _MOST)) / _LOG)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self._count += 1
        self._sum += value
        self._least, self._most = min(self._least, value), max(self._most, value)

    def quantile(self, share: float) -> float:
        """Return the smallest value that at least this share does not exceed, within 1 %; NaN if there are none."""
        rank, seen = share * self._count, 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                middle = 2 * _GROWTH**bucket / (_GROWTH + 1)
                return min(max(middle, self._least), self._most)
        return math.nan

    def spread(self) -> Spread | None:
        """Return how the values are spread; None if there are none."""
        if not self._count:
            return None
        median, p90, p99 = (self.quantile(share) for share in (0.5, 0.9, 0.99))
        return Spread(self._count, self._sum / self._count, self._least, median, p90, p99, self._most)
