"""How a fleet sleeps: all of its engines do, none is started in the meantime, and each is asked when it is awake."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING

from corelm.application import in_thread
from corelm.errors import (
    CapabilityError,
    EngineError,
    InvalidRequestError,
    StaleWeightsError,
    brief,
    first_few,
    message,
)
from corelm.spec import SleepRequest, WakeRequest
from corelm_fleet.records import STARTING, ReplicaRun, State
from corelm_fleet.replica import OpenReplica

if TYPE_CHECKING:
    from corelm_fleet.runner import FleetRunner

#: Seconds between two looks whether all engines have started.
_LOOK = 0.05
#: What an engine raises that has refused and changed nothing.
_REFUSALS = (CapabilityError, InvalidRequestError)


def sleep_all(runner: FleetRunner, request: SleepRequest) -> None:
    """Put every engine to sleep. One that does not fall asleep is ended, so that its memory is free nevertheless.

    Raises:
        CapabilityError, InvalidRequestError: an engine refused, and all are awake. One that had dropped its weights is
            started again.
        EngineError: no engine is left.
    """
    # Start no engine from now on. Those that are starting finish first: nothing can put them to sleep half-way.
    runner.do(runner.state.fall_asleep)
    try:
        _await_started(runner)
        _each(runner, lambda replica: replica.backend.sleep(request.level), "it did not fall asleep")
    except BaseException as error:
        if isinstance(error, _REFUSALS):
            _each(runner, _wake_with_weights, "it did not wake")
        if isinstance(error, Exception):
            runner.do(runner.state.woken)
        # After Ctrl-C, engines may still fall asleep. `wake` wakes them, and starts those that were lost.
        raise


def wake_all(runner: FleetRunner, request: WakeRequest) -> None:
    """Wake a part of every engine, or all of it. One that does not wake is ended, and started again like after a death.

    Raises:
        StaleWeightsError: no engine woke with the weights that it had.
        EngineError: no engine is left.
    """
    try:
        _each(runner, lambda replica: replica.backend.wake(request.tags), "it did not wake")
    finally:
        if request.last:
            runner.do(runner.state.woken)


def _wake_with_weights(replica: OpenReplica) -> None:
    replica.backend.wake()
    if not replica.backend.engine.weights.answers:
        raise EngineError("it has dropped its weights, and another engine refused to sleep", usable=False)


def _await_started(runner: FleetRunner) -> None:
    """Wait until no engine is being started or loads weights. The limits of the fleet bound this."""
    busy = (*STARTING, State.LOADING)
    while not runner.closed and any(each.state in busy for each in list(runner.state.replicas.values())):
        runner.do(runner.state.tick)
        time.sleep(_LOOK)


def _each(runner: FleetRunner, job: Callable[[OpenReplica], None], what: str) -> None:
    """Do a job with every engine that runs, at once. End those that fail or take longer than loading weights may.

    Raises:
        CapabilityError, InvalidRequestError: an engine refused.
        EngineError: all failed.
    """
    running = dict(runner.runs.running)
    futures = {run: in_thread(partial(job, each), f"corelm-fleet-{run.replica}") for run, each in running.items()}
    late = wait(futures.values(), runner.state.limits.load).not_done
    failures: dict[ReplicaRun, BaseException] = {}
    refusals: list[CapabilityError | InvalidRequestError] = []
    for run, future in futures.items():
        error = TimeoutError(f"not within {runner.state.limits.load:g} s") if future in late else future.exception()
        if isinstance(error, _REFUSALS):
            refusals.append(error)
        elif error is not None:
            failures[run] = error
            runner.do(runner.state.died, run, why=f"{what}: {message(error)}")
    if failures and len(failures) == len(futures):
        reasons = first_few([f"{run.replica}: {brief(message(error))}" for run, error in failures.items()])
        stale = all(isinstance(error, StaleWeightsError) for error in failures.values())
        raise (StaleWeightsError if stale else EngineError)(f"no engine of the fleet is left: {reasons}", usable=None)
    if refusals:
        raise refusals[0]
