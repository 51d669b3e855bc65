"""`Timing`: how long the calls of an engine take, and what they yield, in bounded memory."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from corelm_interop.observer import ObservedCall, Observer

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HookTiming:
    """The calls of one hook. Times are in seconds.

    Attributes:
        calls: calls that have ended, those that failed and those made again included.
        failures: calls that raised.
        errors: how many of them raised an error of each class; after 20 classes, "others".
        retries: calls for rows that the engine had been asked for before.
        rows: prompts, sequences or texts in calls that did not fail.
        failed_rows: answers with the finish reason `error`.
        given_tokens: ids of their prompts or sequences. A prompt that is sampled n times counts n times, unless the
            engine samples it n times by itself.
        sampled_tokens: ids of their answers.
        cached_tokens: given ids that the engine took from its prefix cache; None if it never said.
        cache_hits: `cached_tokens` as a share of the ids of the prompts of which the engine said so; None likewise.
        busy: the time in which at least one call was in the engine.
        duration: of a call, in the engine.
        wait: of a user's call, from the check of its arguments until the engine was asked: in the queue of the batcher
            and for the engine's lock. Weights that wait in the batcher's queue are counted from the end of that queue.
        first_token: from that check until the first token of an answer came. Only of answers whose tokens were
            delivered as they were sampled, which takes an engine with `streaming` and a caller that reads along; None
            without any.
        token_interval: the mean time between two tokens of such an answer.
        rows_per_call: how many rows a call had.
    """

    calls: int
    failures: int
    errors: Mapping[str, int]
    retries: int
    rows: int
    failed_rows: int
    given_tokens: int
    sampled_tokens: int
    cached_tokens: int | None
    cache_hits: float | None
    busy: float
    duration: Spread | None
    wait: Spread | None
    first_token: Spread | None
    token_interval: Spread | None
    rows_per_call: Spread | None

    @property
    def given_per_second(self) -> float:
        """Given ids per second in which at least one call was in the engine; 0.0 without calls."""
        return self.given_tokens / self.busy if self.busy else 0.0

    @property
    def sampled_per_second(self) -> float:
        """Sampled ids per second in which at least one call was in the engine; 0.0 without calls."""
        return self.sampled_tokens / self.busy if self.busy else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and the two rates by name, as JSON can hold them."""
        rates = {"given_per_second": self.given_per_second, "sampled_per_second": self.sampled_per_second}
        return {**asdict(self), **rates}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TimingSummary:
    """What a `Timing` has measured since it was made or reset. Its `repr` is a text of a few lines.

    Attributes:
        seconds: how long that was.
        hooks: the hooks that were called, by name.
    """

    seconds: float
    hooks: Mapping[str, HookTiming] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {"seconds": self.seconds, "hooks": {name: hook.to_dict() for name, hook in self.hooks.items()}}

    def __repr__(self) -> str:
        blocks = [f"{_number(len(self.hooks), 'hook')} called in {_time(self.seconds)}"]
        blocks += ["\n  ".join(_lines(name, hook)) for name, hook in self.hooks.items()]
        return "\n".join(blocks)


def _lines(name: str, hook: HookTiming) -> list[str]:
    head = [_number(hook.calls, "call")]
    if hook.failures:
        head.append(f"{hook.failures:,} failed ({', '.join(f'{error} {n}' for error, n in hook.errors.items())})")
    if hook.retries:
        head.append(f"{hook.retries:,} made again")
    if hook.rows:
        failed = f" ({hook.failed_rows:,} of them failed)" if hook.failed_rows else ""
        head.append(_number(hook.rows, "row") + failed)
    lines = [f"{name}: {', '.join(head)}; busy for {_time(hook.busy)}"]
    if hook.given_tokens:
        cached = "" if hook.cache_hits is None else f", {hook.cache_hits:.0%} of them cached"
        lines.append(f"given          {hook.given_tokens:,} tokens, {hook.given_per_second:,.0f} per second{cached}")
    if hook.sampled_tokens:
        lines.append(f"sampled        {hook.sampled_tokens:,} tokens, {hook.sampled_per_second:,.0f} per second")
    named = {
        "duration": hook.duration,
        "wait": hook.wait,
        "first token": hook.first_token,
        "token interval": hook.token_interval,
    }
    for what, spread in named.items():
        if spread is not None:
            values = {"median": spread.median, "90 %": spread.p90, "99 %": spread.p99, "most": spread.most}
            lines.append(f"{what:<15}" + ", ".join(f"{each} {_time(value)}" for each, value in values.items()))
    return lines


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _time(seconds: float) -> str:
    """Return a time for people.

    >>> _time(0.0000213), _time(0.0213), _time(21.3)
    ('21.3 µs', '21.3 ms', '21.3 s')
    """
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if seconds * s >= 1), ("µs", 1e6))
    return f"{seconds * scale:.3g} {unit}"


#: Classes of errors that are counted one by one.
_CLASSES = 20
#: Fields of `HookTiming` that are sums, and those that are spreads.
_TOTALS = ("calls", "failures", "retries", "rows", "failed_rows", "given_tokens", "sampled_tokens")
_SPREADS = ("duration", "wait", "first_token", "token_interval", "rows_per_call")


class Timing(Observer):
    """Measures the calls of an engine: tokens per second, waits, times to the first token, failures, cache hits.

    ::

        timing = Timing()
        with corelm.get_backend("vllm", model, wrappers=[timing]) as backend:
            ...
        print(timing.summary())

    It measures at the border between core and the plugin: behind the batcher, and in front of a fleet, of an engine in
    another process, and of a server. It keeps histograms, and no more for a million calls than for a hundred. A fleet
    is one engine to it: rows that a replica runs again are in the time of their call. One `Timing` may be passed to
    several engines, and then adds them up.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._since = time.monotonic()
        self._hooks: dict[str, _Counts] = {}

    def summary(self) -> TimingSummary:
        """Return what was measured since this was made or reset."""
        now = time.monotonic()
        with self._lock:
            used = {name: each for name, each in self._hooks.items() if each.totals["calls"] or each.inside}
            hooks = {name: each.summary(now) for name, each in used.items()}
            return TimingSummary(seconds=now - self._since, hooks=hooks)

    def reset(self) -> TimingSummary:
        """Return the summary and begin again. A call under way is counted when it ends, with its whole duration."""
        with self._lock:
            last, now = self.summary(), time.monotonic()
            self._since = now
            self._hooks = {name: _Counts(counts.inside, now) for name, counts in self._hooks.items() if counts.inside}
        return last

    def began(self, call: ObservedCall) -> None:
        with self._lock:
            if call.hook not in self._hooks:
                self._hooks[call.hook] = _Counts(0, call.began)
            self._hooks[call.hook].enter(call)

    def ended(self, call: ObservedCall) -> None:
        with self._lock:
            self._hooks[call.hook].leave(call)


class _Counts:
    """Counts the calls of one hook. Callers of its methods hold the lock.

    Attributes:
        totals: sums, by the names of the fields of `HookTiming`.
        inside: how many calls are under way.
    """

    def __init__(self, inside: int, now: float) -> None:
        self.totals: Counter[str] = Counter()
        self.inside, self._busy, self._busy_since, self._given_of_cached = inside, 0.0, now, 0
        self._errors: Counter[str] = Counter()
        self._spreads = {name: Histogram() for name in _SPREADS}

    def enter(self, call: ObservedCall) -> None:
        if self.inside == 0:
            self._busy_since = call.began
        self.inside += 1
        self.totals["retries"] += call.again
        self._add(wait=call.waits)

    def leave(self, call: ObservedCall) -> None:
        self.inside -= 1
        if self.inside == 0:
            self._busy += max(0.0, call.ended - self._busy_since)
        self.totals["calls"] += 1
        self._add(duration=[call.seconds], first_token=call.first_tokens(), token_interval=call.token_intervals())
        if call.error is not None:
            self.totals["failures"] += 1
            kind = type(call.error).__name__
            self._errors[kind if kind in self._errors or len(self._errors) < _CLASSES else "others"] += 1
            return
        self.totals.update(rows=call.rows, given_tokens=call.given_tokens, sampled_tokens=call.sampled_tokens)
        self.totals["failed_rows"] += call.finish_reasons.count("error")
        self._add(rows_per_call=[call.rows] if call.rows else [])
        if (cached := call.cached_tokens()) is not None:
            self.totals["cached_tokens"] += cached[0]
            self._given_of_cached += cached[1]

    def summary(self, now: float) -> HookTiming:
        fields: dict[str, Any] = {name: self.totals[name] for name in _TOTALS}
        fields |= {name: each.spread() for name, each in self._spreads.items()}
        cached, given = self.totals.get("cached_tokens"), self._given_of_cached
        return HookTiming(
            **fields,
            errors=dict(self._errors),
            cached_tokens=cached,
            cache_hits=cached / given if cached is not None and given else None,
            busy=self._busy + (max(0.0, now - self._busy_since) if self.inside else 0.0),
        )

    def _add(self, **values: Sequence[float]) -> None:
        for name, some in values.items():
            for value in some:
                self._spreads[name].add(value)
