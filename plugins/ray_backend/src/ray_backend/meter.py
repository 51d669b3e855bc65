"""`Meter`: counts what an engine in an actor does, and keeps its weights from changing under another driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import (
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightUpdate,
    hookimpl,
)
from corelm_fleet import Throughput


class Meter:
    """Wraps the hooks of an engine.

    Args:
        claim: sets `changed` unless several drivers use the engine; returns how many do.

    Attributes:
        starts: how often the replica was started, this time included.
        epoch: how often its weights were changed.
        changed: whether its weights are other ones than it was opened with, or are being changed, or it sleeps. No
            other driver may join it then.
    """

    def __init__(self, claim: Callable[[], int]) -> None:
        self._claim = claim
        self.changed = self._woken_as = False
        self.starts = 1
        self.epoch = 0
        self._rows = 0
        self._speed = Throughput(time.monotonic())
        self._lock = threading.Lock()

    @hookimpl(wrapper=True)
    def generate(self, request: GenerateRequest) -> Generator[None, GenerateResult, GenerateResult]:
        self._add(len(request.prompts))
        try:
            result = yield
        finally:
            self._add(-len(request.prompts))
        with self._lock:
            self._speed.add(int(result.ids.lengths.sum()), time.monotonic())
        return result

    @hookimpl(wrapper=True)
    def score_logprobs(self, request: ScoreRequest) -> Generator[None, ScoreResult, ScoreResult]:
        self._add(len(request.sequences))
        try:
            return (yield)
        finally:
            self._add(-len(request.sequences))

    @hookimpl(wrapper=True)
    def update_weights(self, request: WeightUpdate) -> Generator[None, bool, bool]:
        before = self.changed
        self._claim_alone("update_weights", "get answers of new weights under the label of the old ones")
        try:
            loaded = yield
        except (InvalidRequestError, CapabilityError):
            # The engine has kept its weights.
            self.changed = before
            raise
        self.epoch += 1
        return loaded

    @hookimpl(wrapper=True)
    def sleep(self, request: SleepRequest) -> Generator[None, bool, bool]:
        # A driver that joins now would find an engine that does not answer.
        self._woken_as = self.changed or request.level > 1
        before = self.changed
        self._claim_alone("sleep_levels", "get no answers while it sleeps")
        try:
            return (yield)
        except (InvalidRequestError, CapabilityError):
            self.changed = before
            raise

    @hookimpl(wrapper=True)
    def wake(self, request: WakeRequest) -> Generator[None, bool, bool]:
        awake = yield
        if request.last and self.epoch == 0:
            self.changed = self._woken_as
        return awake

    def figures(self) -> dict[str, Any]:
        """Return the rows in work, the tokens per second of the last minute, the epoch and the number of starts."""
        with self._lock:
            return {
                "rows": self._rows,
                "tokens_per_second": self._speed.per_second(time.monotonic()),
                "epoch": self.epoch,
                "starts": self.starts,
            }

    def _claim_alone(self, capability: str, what: str) -> None:
        drivers = self._claim()
        if drivers > 1:
            raise CapabilityError(
                f"{drivers} drivers use the actor, and the others would {what}; close their backends first, or give "
                "them another actor_name",
                capability=capability,
            )

    def _add(self, rows: int) -> None:
        with self._lock:
            self._rows += rows
