"""`VersionsInFlight`: how the weights were called while a call was under way, if they changed in its course.

An engine says from which token on an answer was sampled with the weights of an update. Whether these weights have the
label that the update asked for is known later: loading may fail, or the listener may object.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from corelm.backend.rwlock import ReadersWriterLock, Visit
from corelm.backend.weights import Weights
from corelm.errors import BackendTimeoutError, EngineError
from corelm.spec.deadline import Deadline
from corelm.spec.provenance import VersionRuns
from corelm.spec.records import GenerateRequest, GenerateResult
from corelm.spec.version_runs import check_runs, renamed, with_runs

#: Seconds between two looks whether an update has ended.
_PAUSE = 0.01


@dataclass(eq=False)
class Attempt:
    """One update of the weights, as the calls under way see it.

    Attributes:
        asked: the label that the update asked for, which the engine was told.
        label: the one that the weights have got: first one that none had before, which they keep if loading fails; None
            if the update was refused and changed nothing.
        number: counts the attempts.
        goes_on: whether answers go on in it. In another, a call is under way only if its own wrapper makes the update,
            before the engine is asked; all of its tokens are then of the new weights.
        visit: the visit in which it is made. While that holds the lock, the label may still change.
    """

    asked: str
    label: str | None
    number: int
    goes_on: bool
    visit: Visit | None


@dataclass(eq=False)
class CallUnderWay:
    """A call that samples.

    Attributes:
        label: the label of the weights when it began.
        number: that of the last update before it.
        attempts: the updates since then.
    """

    label: str = ""
    number: int = 0
    attempts: list[Attempt] = field(default_factory=list)


class VersionsInFlight:
    """The calls under way to an engine that goes on in updates, and the updates that they have seen.

    An interrupt can end any of this between two bytecodes. So no flag says that an update is under way: the lock does.

    Args:
        name: the name of the backend, for errors.
        weights: the label of the weights in force.
        lock: the engine's, which knows in which visits a thread is.
        ask: calls a hook, given its name and its request.
        fault: returns what makes the error for a result of a hook that breaks the specification.
    """

    def __init__(
        self,
        name: str,
        weights: Weights,
        lock: ReadersWriterLock,
        ask: Callable[[str, Any], Any],
        fault: Callable[[str], Callable[[str], EngineError]],
    ) -> None:
        self._name, self._weights, self._lock = name, weights, lock
        self._ask, self._fail = ask, fault("generate")
        self._calls: dict[CallUnderWay, None] = {}
        self._last: Attempt | None = None
        # A lock in C: its `with` statement cannot be interrupted half-way.
        self._mutex = threading.RLock()

    def sampled(self, request: GenerateRequest) -> Any:
        """Have the engine sample, and return its result under the labels that the weights of its tokens have got.

        A call that begins in the middle of an update first waits for its end, unless the update's listener makes it.

        Raises:
            BackendTimeoutError: an update was under way when the time of the call was over.
            EngineError: the runs are none or go back to earlier weights, the result does not say what it was sampled
                with although it has to, or it names weights that were refused.
        """
        call, deadline = CallUnderWay(), Deadline(request.timeout)
        try:
            while not self._begun(call):
                self._pause(deadline)
            batch = self._ask("generate", replace(request, weight_version=call.label, weight_update=call.number))
            if not isinstance(batch, GenerateResult):
                return batch
            check_runs(batch, self._fail)
            return with_runs(batch, self._settled(batch, call, deadline))
        finally:
            self._calls.pop(call, None)

    def begin(self, asked: str, unused: str, *, goes_on: bool) -> Attempt:
        """Return an update that begins, on the thread that holds the lock for it.

        Args:
            asked: the label that it asks for.
            unused: a label that none had before.
            goes_on: see `Attempt`.
        """
        with self._mutex:
            number = 1 if self._last is None else self._last.number + 1
            self._last = Attempt(asked, unused, number, goes_on, self._visit_of_update())
            for call in list(self._calls):
                call.attempts.append(self._last)
            return self._last

    def _begun(self, call: CallUnderWay) -> bool:
        """Begin a call, unless another thread updates the weights."""
        mine = self._visit_of_update()
        with self._mutex:
            if self._last is not None:
                if self._under_way(self._last) and self._last.visit is not mine:
                    return False
                call.number = self._last.number
            call.label = self._weights.label
            self._calls[call] = None
            return True

    def _visit_of_update(self) -> Visit | None:
        """Return the visit of the update in which this thread is."""
        here = self._lock.visit(exclusive=False).enclosing()
        # A list and no generator: Ctrl-C while a generator that is not exhausted is closed would be lost.
        found = [visit for visit in here if visit.hook == "update_weights"]
        return found[0] if found else None

    def _under_way(self, attempt: Attempt) -> bool:
        return attempt.visit in self._lock.inside

    def _pause(self, deadline: Deadline) -> None:
        if deadline.is_over():
            raise BackendTimeoutError(
                f"backend {self._name!r}, hook generate: an update of the weights was under way when the "
                f"{deadline.timeout:g} s of the call were over"
            )
        time.sleep(_PAUSE)

    def _settled(self, batch: GenerateResult, call: CallUnderWay, deadline: Deadline) -> list[VersionRuns]:
        """Return the runs of a result whose runs were checked.

        If an update is not over yet whose weights the result has seen, this waits for its end. If updates of one label
        have left several labels, its tokens get one that no good weights have.
        """
        given = batch.version_runs
        if given is None:
            if batch.weight_versions is None:
                raise self._fail(
                    "returned neither version_runs nor weight_versions, but a backend that declares "
                    "updates_in_flight has to; see corelm_engine_kit.VersionLog"
                )
            given = tuple(((version, 0),) for version in batch.weight_versions)
        seen = {version for runs in given for version, _ in runs}
        mine = self._visit_of_update()
        while any(each.asked in seen and each.visit is not mine and self._under_way(each) for each in call.attempts):
            self._pause(deadline)
        self._must_ascend(given, call)
        names: dict[str, str] = {}
        for each in call.attempts:
            if not each.goes_on and each.label is not None:
                names[call.label] = each.label
            elif each.label is not None and (each.asked not in names or each.label != each.asked):
                names[each.asked] = each.label
        refused = {each.asked for each in call.attempts if each.goes_on and each.label is None}
        if wrong := sorted((refused - names.keys() - {call.label}) & seen):
            raise self._fail(f"says that tokens were sampled with the weights {wrong[0]!r}, which it has refused")
        return [renamed(runs, lambda version: names.get(version, version)) for runs in given]

    def _must_ascend(self, given: Sequence[VersionRuns], call: CallUnderWay) -> None:
        """Refuse runs in another order than that of the updates. A label that was loaded twice tells nothing."""
        asked = [call.label, *[each.asked for each in call.attempts]]
        order = {label: place for place, label in enumerate(asked) if asked.count(label) == 1}
        for row, runs in enumerate(given):
            known = [(order[version], version, first) for version, first in runs if version in order]
            for (place, before, _), (next_place, version, first) in pairwise(known):
                if next_place < place:
                    back = f"the weights go back from {before!r} to {version!r} at position {first}"
                    raise self._fail(f"row {row}: version_runs: {back}")
