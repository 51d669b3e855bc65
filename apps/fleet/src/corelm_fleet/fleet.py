"""`FleetEngine`: many engines that answer as one engine. It implements the hooks."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

from corelm.application import Call, at_program_end, in_thread, uninterrupted
from corelm.errors import (
    CapabilityError,
    CoreLMError,
    EngineError,
    InvalidRequestError,
    StaleWeightsError,
    brief,
    first_few,
    message,
)
from corelm.spec import (
    AbortRequest,
    Capabilities,
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    HealthRequest,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    TokenizeRequest,
    TokenizeResult,
    WakeRequest,
    WeightUpdate,
    hookimpl,
)
from corelm.validate import invalid, shown
from corelm.waiting import next_item
from corelm_fleet.canary import Canary
from corelm_fleet.pending import PendingCall, Request
from corelm_fleet.records import STARTING, FleetLimits, ReplicaRun, ReplicaStatus, State, UpdateFailed
from corelm_fleet.replica import Member, OpenReplica
from corelm_fleet.replica_runs import own_copy
from corelm_fleet.routing import LeastWork, Policy
from corelm_fleet.runner import FleetRunner

_log = logging.getLogger(__name__)

#: Seconds between two looks at the engines.
_PAUSE = 1.0
#: Seconds between two looks whether replicas have started, when the fleet is opened or falls asleep.
_LOOK = 0.01
#: What an engine raises that has refused and changed nothing.
_REFUSALS = (CapabilityError, InvalidRequestError)


class FleetEngine:
    """Many engines that answer as one engine: `Backend.from_plugin` takes it like any plugin's engine.

    Every row is answered exactly once, or fails with an error that names it. When an engine dies, the rows that it has
    not answered are sent to another one with their own seeds, and it is started again. New weights are loaded into all
    engines before one of them serves again. An engine serves only after its canary has agreed: it answers as the others
    do. While the fleet sleeps, no engine is started again. An engine that does not fall asleep is ended, so that its
    memory is free nevertheless; one that does not wake is ended and started again.

    `weights_state` is not carried: the weights of a fleet change with `update_weights`, or with `weights_changed`. Rows
    of an engine whose weights were changed otherwise are not returned. `to_containers` is core's own: an engine that
    makes its own containers is refused.

    Args:
        members: how each engine is opened. All are opened now, at once.
        name: the name of the fleet, for messages.
        limits: how patient the fleet is.
        canary: how the answers of two engines are compared.
        policy: chooses the engine for the rows of a prompt; None for the one with the least work.

    Attributes:
        capabilities: what every engine can do, except gradients, which cannot leave the threads of the fleet.
        tokenizer: the tokenizer of an engine that runs.

    Raises:
        InvalidRequestError: there are no members, two have one name, or two engines would not answer alike.
        CoreLMError: an engine did not open; the message names it.
        CapabilityError, InvalidRequestError: from `sleep`, an engine refused, and all are awake. One that had dropped
            its weights is started again.
        StaleWeightsError: from `wake`, no engine woke with the weights that it had.
        EngineError: from `sleep` and `wake`, no engine is left.
    """

    def __init__(
        self,
        members: Sequence[Member],
        name: str = "fleet",
        *,
        limits: FleetLimits | None = None,
        canary: Canary | None = None,
        policy: Policy | None = None,
    ) -> None:
        names = [member.name for member in members]
        if not names or len({*names}) < len(names):
            raise invalid("replicas", f"expected engines with different names, got {shown(names)}")
        if limits is not None and not isinstance(limits, FleetLimits):
            raise invalid("fleet_limits", f"expected corelm_fleet.FleetLimits(…), got {shown(limits)}")
        self.name = name
        self._runner = FleetRunner(limits or FleetLimits(), canary or Canary(), policy or LeastWork())
        try:
            for member in members:
                uninterrupted(partial(self._runner.join, member))
            self.capabilities: Capabilities = self._opened()
            self._await_canaries()
        except BaseException:
            self._runner.close()
            raise
        self.tokenizer = self._runner.runs.tokenizer
        stop = threading.Event()
        # The thread holds no reference to the runner, so that a fleet that is dropped can be collected.
        watcher = threading.Thread(
            target=_watch_over, args=(weakref.ref(self._runner), stop), name="corelm-fleet-watch", daemon=True
        )
        watcher.start()
        self._stop_watching = weakref.finalize(self, stop.set)
        self._stop_watching.atexit = False
        _runners.add(self._runner)

    def __repr__(self) -> str:
        replicas = list(self._runner.state.replicas.values())
        return f"FleetEngine({', '.join(f'{each.name}: {each.state.value}' for each in replicas)})"

    def status(self) -> list[ReplicaStatus]:
        """Return how each replica is doing."""
        return self._runner.status()

    def join(self, member: Member) -> None:
        """Open one more engine; return at once. It serves when it has the weights in force and its canary agrees.

        Args:
            member: how it is opened. Its name may be that of an engine that has left.

        Raises:
            BackendClosedError: the fleet is closed.
            BackendAsleepError: the fleet sleeps.
            InvalidRequestError: an engine of this name has not left.
        """
        self._runner.join(member)

    def drain(self, name: str) -> None:
        """Let an engine finish its rows and then close it; return at once.

        Raises:
            InvalidRequestError: no engine has this name.
        """
        self._runner.do(self._runner.state.drain, name)

    @hookimpl
    def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        failure: CoreLMError | None = None
        for replica in self._runner.runs.each_running():
            try:
                tokens: TokenizeResult = replica.backend.engine.call(Call("tokenize", request))
                return tokens
            except CoreLMError as error:
                if not replica.closed and getattr(error, "usable", None) is not False:
                    raise
                failure = error
        raise failure or EngineError("no engine of the fleet runs", usable=False)

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        result: GenerateResult = self._serve(request)
        return result

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        result: ScoreResult = self._serve(request)
        return result

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        ended = next_item(uninterrupted(partial(self._runner.update, own_copy(request))))
        if isinstance(ended, Exception):
            raise ended
        if not isinstance(ended, UpdateFailed):
            for replica, why in ended.missed.items():
                _log.warning("%s does not have weights %s yet: %s", replica, brief(request.version), brief(why))
            return True
        reasons = first_few([f"{replica}: {why}" for replica, why in ended.reasons.items()])
        if ended.refused and not request.by_owner:
            raise invalid("weights", f"no engine of the fleet took them, {self._still_has()}: {reasons}")
        if not ended.reasons:
            raise EngineError("no engine of the fleet is left", usable=False)
        kind = StaleWeightsError if self._runner.runs.disagreed >= ended.reasons.keys() else EngineError
        raise kind(f"no engine of the fleet has the new weights, {self._still_has()}: {reasons}")

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        runner = self._runner
        # Start no engine from now on. Those that are starting finish first: nothing can put them to sleep half-way.
        runner.do(runner.state.fall_asleep)
        try:
            busy = (*STARTING, State.LOADING)
            while not runner.closed and any(each.state in busy for each in list(runner.state.replicas.values())):
                runner.do(runner.state.tick)
                time.sleep(_LOOK)
            self._each(lambda replica: replica.backend.sleep(request.level), "it did not fall asleep")
        except BaseException as error:
            if isinstance(error, _REFUSALS):
                self._each(_wake_with_weights, "it did not wake")
            if isinstance(error, Exception):
                runner.do(runner.state.woken)
            # After Ctrl-C, engines may still fall asleep. `wake` wakes them, and starts those that were lost.
            raise
        return True

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        try:
            self._each(lambda replica: replica.backend.wake(request.tags), "it did not wake")
        finally:
            if request.last:
                self._runner.do(self._runner.state.woken)
        return True

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        state = self._runner.state
        able = (State.HEALTHY,) if state.updating is None else (State.HEALTHY, State.LOADING)
        return any(replica.state in able for replica in list(state.replicas.values()))

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        uninterrupted(partial(self._runner.abort, request.request_ids))
        return True

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        self._stop_watching()
        self._runner.close()
        return True

    def _serve(self, request: Request) -> Any:
        call = PendingCall(request)
        try:
            uninterrupted(partial(self._runner.begin, call))
            call.wait()
        except BaseException:
            # For example a TimeoutError or a KeyboardInterrupt.
            uninterrupted(partial(self._runner.leave, call))
            raise
        return call.result(self._runner.label())

    def _each(self, job: Callable[[OpenReplica], None], what: str) -> None:
        """Do a job with every engine that runs, at once. End those that fail or take longer than loading weights may.

        Raises:
            CapabilityError, InvalidRequestError: an engine refused.
            EngineError: all failed.
        """
        runner, limit = self._runner, self._runner.state.limits.load
        running = dict(runner.runs.running)
        futures = {run: in_thread(partial(job, each), f"corelm-fleet-{run.replica}") for run, each in running.items()}
        late = wait(futures.values(), limit).not_done
        failures: dict[ReplicaRun, BaseException] = {}
        refusals: list[CapabilityError | InvalidRequestError] = []
        for run, future in futures.items():
            error = TimeoutError(f"not within {limit:g} s") if future in late else future.exception()
            if isinstance(error, _REFUSALS):
                refusals.append(error)
            elif error is not None:
                failures[run] = error
                runner.do(runner.state.died, run, why=f"{what}: {message(error)}")
        if failures and len(failures) == len(futures):
            reasons = first_few([f"{run.replica}: {brief(message(error))}" for run, error in failures.items()])
            disagree = all(isinstance(error, StaleWeightsError) for error in failures.values())
            kind = StaleWeightsError if disagree else EngineError
            raise kind(f"no engine of the fleet is left: {reasons}", usable=None)
        if refusals:
            raise refusals[0]

    def _still_has(self) -> str:
        """Return which weights the fleet has after an update that no engine took."""
        states = [each.backend.engine.weights.state for each in list(self._runner.runs.running.values())]
        if states and all(state.without_weights for state in states):
            return "and it still has no weights; call update_weights with a set that fits"
        return "and the old ones are in force"

    def _opened(self) -> Capabilities:
        """Wait until every engine is open, and return what all can do.

        Raises:
            CoreLMError: one did not open; the message names it.
            InvalidRequestError: two would not answer alike.
        """
        runner = self._runner
        while any(each.state is State.JOINING for each in list(runner.state.replicas.values())):
            if runner.delayed:
                raise EngineError("opening the engines needs threads: the system has no room for them", usable=True)
            time.sleep(_LOOK)
        for name in runner.runs.members:
            if (error := runner.runs.failures.get(name)) is not None:
                if isinstance(error, CoreLMError):
                    error.args = (f"{name}: {error.args[0]}", *error.args[1:])
                raise error
        return runner.runs.agree()

    def _await_canaries(self) -> None:
        """Wait until the canary of every engine has agreed."""
        replicas = self._runner.state.replicas
        while not all(replica.state is State.HEALTHY for replica in list(replicas.values())):
            for replica in list(replicas.values()):
                if replica.state in (State.DEAD, State.GONE):
                    if replica.name not in self._runner.runs.disagreed:
                        raise EngineError(f"{replica.name} failed when the fleet was opened: {replica.why}")
                    others = [each.name for each in replicas.values() if each.state is State.HEALTHY]
                    raise invalid(
                        "replicas",
                        f"the engines of a fleet must hold the same weights, but {replica.name} does not answer like "
                        f"{' and '.join(others) or 'the others'}: {replica.why}",
                    )
            self._runner.do(self._runner.state.tick)
            time.sleep(_LOOK)


def _wake_with_weights(replica: OpenReplica) -> None:
    replica.backend.wake()
    if not replica.backend.engine.weights.answers:
        raise EngineError("it has dropped its weights, and another engine refused to sleep", usable=False)


def _watch_over(runner: weakref.ref[FleetRunner], stop: threading.Event) -> None:
    while not stop.wait(_PAUSE):
        found = runner()
        if found is None or found.closed:
            return
        try:
            found.look_around()
        except Exception:
            # Without this thread, no engine would be started again.
            _log.exception("a look at the engines of a fleet failed; the next one follows")
        del found


_runners: weakref.WeakSet[FleetRunner] = weakref.WeakSet()


@at_program_end
def _retire() -> None:
    for runner in list(_runners):
        runner.retire()
