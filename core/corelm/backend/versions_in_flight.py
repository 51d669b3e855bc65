"""`VersionsInFlight`: how the weights were called while a call was under way, if they changed in its course.

An engine says from which token on an answer was sampled with the weights of an update. Whether these weights have the
label that the update asked for is known later: loading may fail, or the canary may disagree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from corelm.backend.rwlock import ReadersWriterLock
from corelm.backend.version_runs import check_runs, renamed, with_runs
from corelm.backend.weights import Weights
from corelm.errors import EngineError
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import VersionRuns
from corelm.spec.records import GenerateRequest, GenerateResult

#: Seconds after which a waiting thread looks again even if it was not woken: the other may have been interrupted.
_LOOK_AGAIN = 0.25


@dataclass(eq=False)
class Attempt:
    """One update of the weights while calls were under way.

    Attributes:
        asked: the label that the update asked for, which the engine was told.
        number: counts the attempts.
        goes_on: whether answers go on in it. In another, a call is under way only if its own wrapper makes the update,
            before the engine is asked; all of its tokens are then of the new weights.
        label: the one that the weights have got; None if the update was refused and changed nothing.
        done: whether it has ended.
    """

    asked: str
    number: int
    goes_on: bool
    label: str | None = None
    done: bool = False


@dataclass(eq=False)
class CallUnderWay:
    """A call that samples.

    Attributes:
        label: the label of the weights when it began.
        attempts: the updates since then.
    """

    label: str
    attempts: list[Attempt] = field(default_factory=list)


class VersionsInFlight:
    """The calls under way, and the updates that they have seen.

    Args:
        capabilities: whether the engine says which tokens are of which weights.
        weights: the label of the weights in force.
        lock: the engine's, which knows in which visits a thread is.
        ask: calls a hook, given its name and its request.
        fault: returns what makes the error for a result of a hook that breaks the specification.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        weights: Weights,
        lock: ReadersWriterLock,
        ask: Callable[[str, Any], Any],
        fault: Callable[[str], Callable[[str], EngineError]],
    ) -> None:
        self._reports = capabilities.updates_in_flight
        self._weights, self._lock, self._ask, self._fail = weights, lock, ask, fault("generate")
        self._changed = threading.Condition()
        self._calls: set[CallUnderWay] = set()
        self._attempt: Attempt | None = None
        self._count = 0

    def sampled(self, request: GenerateRequest) -> Any:
        """Have the engine sample, and return its result under the labels that the weights of its tokens have got.

        A call that begins in the middle of an update first waits for its end, unless the update's canary makes it.

        Raises:
            EngineError: the runs are none, the result does not say what it was sampled with although it has to, or it
                names weights that were refused.
        """
        in_update = any(visit.hook == "update_weights" for visit in self._lock.visit(exclusive=False).enclosing())
        with self._changed:
            while self._attempt is not None and not in_update:
                self._changed.wait(_LOOK_AGAIN)
            call, number = CallUnderWay(self._weights.label), self._count
            self._calls.add(call)
        try:
            batch = self._ask(
                "generate",
                replace(request, weight_version=call.label, weight_update=number) if self._reports else request,
            )
            if not isinstance(batch, GenerateResult):
                return batch
            check_runs(batch, self._fail)
            return with_runs(batch, self._settled(batch, call)) if self._reports else batch
        finally:
            with self._changed:
                self._calls.discard(call)

    @contextmanager
    def update(self, *, goes_on: bool) -> Iterator[Callable[[str], Attempt]]:
        """Yield a function that begins an update of this label. The update ends with the block.

        Args:
            goes_on: see `Attempt`.
        """
        made: list[Attempt] = []

        def begin(asked: str) -> Attempt:
            with self._changed:
                self._count += 1
                attempt = Attempt(asked, self._count, goes_on)
                made.append(attempt)
                self._attempt = attempt
                for call in self._calls:
                    call.attempts.append(attempt)
            return attempt

        try:
            yield begin
        finally:
            with self._changed:
                for attempt in made:
                    attempt.done = True
                self._attempt = None
                self._changed.notify_all()

    def _settled(self, batch: GenerateResult, call: CallUnderWay) -> list[VersionRuns]:
        """Return the runs of a result whose runs were checked.

        If an update is not over yet whose weights the result has seen, this waits for its end. If updates of one label
        have left several labels, its tokens get one that no good weights have.
        """
        given = batch.version_runs
        if given is None:
            if batch.weight_versions is None:
                raise self._fail(
                    "returned neither version_runs nor weight_versions, but a backend that declares "
                    "updates_in_flight has to; see corelm.support.VersionLog"
                )
            given = tuple(((version, 0),) for version in batch.weight_versions)
        seen = {version for runs in given for version, _ in runs}
        with self._changed:
            while any(each.asked in seen and not each.done for each in call.attempts):
                self._changed.wait(_LOOK_AGAIN)
            attempts = list(call.attempts)
        names: dict[str, str] = {}
        for each in attempts:
            if not each.goes_on and each.label is not None:
                names[call.label] = each.label
            elif each.label is not None and (each.asked not in names or each.label != each.asked):
                names[each.asked] = each.label
        refused = {each.asked for each in attempts if each.goes_on and each.label is None} - names.keys() - {call.label}
        if wrong := sorted(refused & seen):
            raise self._fail(f"says that tokens were sampled with the weights {wrong[0]!r}, which it has refused")
        return [renamed(runs, lambda version: names.get(version, version)) for runs in given]
