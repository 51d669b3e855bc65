"""`Timing`: how long the calls of an engine take, and what they yield, in bounded memory."""

from __future__ import annotations

import threading
import time
from collections import Counter

from corelm_interop.histogram import Histogram
from corelm_interop.observer import ObservedCall, Observer
from corelm_interop.timing_summary import HookTiming, TimingSummary

#: Classes of errors that are counted one by one.
_CLASSES = 20


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
            hooks = {name: counts.summary(now) for name, counts in self._hooks.items() if counts.calls or counts.inside}
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
    """Counts the calls of one hook. Callers of its methods hold the lock."""

    def __init__(self, inside: int, now: float) -> None:
        self.calls, self.inside, self._busy, self._busy_since = 0, inside, 0.0, now
        self._failures = self._retries = self._rows = self._failed_rows = 0
        self._given = self._sampled = self._cached = self._given_of_cached = 0
        self._says_cached = False
        self._errors: Counter[str] = Counter()
        self._duration, self._wait, self._rows_per_call = Histogram(), Histogram(), Histogram()
        self._first_token, self._token_interval = Histogram(), Histogram()

    def enter(self, call: ObservedCall) -> None:
        if self.inside == 0:
            self._busy_since = call.began
        self.inside += 1
        self._retries += call.again
        for wait in call.waits:
            self._wait.add(wait)

    def leave(self, call: ObservedCall) -> None:
        self.inside -= 1
        if self.inside == 0:
            self._busy += max(0.0, call.ended - self._busy_since)
        self.calls += 1
        self._duration.add(call.seconds)
        for seconds in call.first_tokens():
            self._first_token.add(seconds)
        for seconds in call.token_intervals():
            self._token_interval.add(seconds)
        if call.error is not None:
            self._failures += 1
            kind = type(call.error).__name__
            self._errors[kind if kind in self._errors or len(self._errors) < _CLASSES else "others"] += 1
            return
        self._rows += call.rows
        if call.rows:
            self._rows_per_call.add(call.rows)
        self._failed_rows += call.finish_reasons.count("error")
        self._given += call.given_tokens
        self._sampled += call.sampled_tokens
        if (cached := call.cached_tokens()) is not None:
            self._says_cached = True
            self._cached, self._given_of_cached = self._cached + cached[0], self._given_of_cached + cached[1]

    def summary(self, now: float) -> HookTiming:
        under_way = max(0.0, now - self._busy_since) if self.inside else 0.0
        hits = self._cached / self._given_of_cached if self._given_of_cached else None
        return HookTiming(
            calls=self.calls,
            failures=self._failures,
            errors=dict(self._errors),
            retries=self._retries,
            rows=self._rows,
            failed_rows=self._failed_rows,
            given_tokens=self._given,
            sampled_tokens=self._sampled,
            cached_tokens=self._cached if self._says_cached else None,
            cache_hits=hits,
            busy=self._busy + under_way,
            duration=self._duration.spread(),
            wait=self._wait.spread(),
            first_token=self._first_token.spread(),
            token_interval=self._token_interval.spread(),
            rows_per_call=self._rows_per_call.spread(),
        )
