"""`TimingSummary`: what a `Timing` has measured, as numbers and as a text that one can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from corelm_interop.histogram import Spread


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
