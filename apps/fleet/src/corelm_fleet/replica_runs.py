"""`ReplicaRuns`: starts, stops and loads the engines of a fleet, and asks their canaries, as its state decides."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from corelm.errors import CapabilityError, EngineError, InvalidRequestError, StaleWeightsError, brief, message
from corelm.spec import Capabilities, CloseRequest, WeightUpdate, whole_tensor
from corelm.validate import invalid
from corelm_fleet.agreement import capabilities_of_all, facts, require_alike
from corelm_fleet.canary import Canary
from corelm_fleet.records import STARTING, ReplicaRun, State
from corelm_fleet.replica import Member, OpenReplica, Said
from corelm_fleet.state import FleetState
from corelm_fleet.tokenizer import FleetTokenizer

_log = logging.getLogger(__name__)

#: Seconds between two looks whether an engine runs.
_LOOK = 0.05


class ReplicaRuns:
    """The open engines of a fleet. Each job runs on a separate thread and reports to the state machine.

    Args:
        canary: see `FleetEngine`.
        lock: held around every event of the state machine.
        report: takes an event of the state machine and its arguments.

    Attributes:
        members: how each replica is opened.
        failures: why replicas did not start, until the fleet is open.
        tokenizer: stands for their tokenizers.
        running: the engines that are open.
        disagreed: the replicas whose canary has disagreed since the fleet was opened or the last update began.
        ended: whether the fleet is closed or the program ends, so that nothing is started any more.
    """

    def __init__(
        self,
        canary: Canary,
        state: FleetState,
        lock: threading.RLock,
        report: Callable[..., None],
    ) -> None:
        self.members: dict[str, Member] = {}
        self.failures: dict[str, BaseException] = {}
        self._canary, self._state, self._lock, self._report = canary, state, lock, report
        self.running: dict[ReplicaRun, OpenReplica] = {}
        self.disagreed: set[str] = set()
        self.ended = False
        self._stopping: dict[str, threading.Event] = {}
        self._weights = KeptWeights()
        self._references: dict[int, Said] = {}
        # The replicas that were there when the owner of the weights changed them.
        self._witnesses: frozenset[ReplicaRun] = frozenset()
        # What each engine said when it was opened, and what all can do, once the fleet is open.
        self._facts: dict[str, tuple[Mapping[str, Any], Capabilities]] = {}
        self._common: Capabilities | None = None
        self._last_tokenizer: Any = None
        self.tokenizer = FleetTokenizer(self._tokenizers, self._each_tokenizer)

    def agree(self) -> Capabilities:
        """Compare the engines, which are all open for the first time, and return what all can do.

        Raises:
            InvalidRequestError: two of them would not answer alike.
        """
        first = next(iter(self.members))
        for name in self.members:
            require_alike(first, self._facts[first][0], name, self._facts[name][0])
        self._common = capabilities_of_all([self._facts[name][1] for name in self.members])
        return self._common

    def each_running(self) -> Iterator[OpenReplica]:
        """Yield the engines that run, and then those that are started later, as long as rows would wait for one."""
        end, seen = time.monotonic() + self._state.limits.outage, list[OpenReplica]()
        while True:
            for replica in list(self.running.values()):
                if replica not in seen:
                    seen.append(replica)
                    yield replica
            gone = all(each.state is State.GONE for each in list(self._state.replicas.values()))
            if self.ended or gone or time.monotonic() > end:
                return
            time.sleep(_LOOK)

    def begin_update(self, epoch: int, update: WeightUpdate) -> None:
        """Keep the weights of an epoch that is being loaded."""
        self._weights.begin(epoch, self._state.epoch, update)
        self.disagreed.clear()
        if update.by_owner:
            self._witnesses = frozenset(self.running)

    def end_update(self, epoch: int) -> None:
        """Forget all weights but those of the epoch in force."""
        self._weights.end(epoch)
        self._references = {each: said for each, said in self._references.items() if each == epoch}

    def begin_stop(self, run: ReplicaRun) -> OpenReplica | None:
        """Take an engine out of service. Its next run does not start before `stop` has ended this one."""
        replica = self.running.pop(run, None)
        if replica is not None:
            self._stopping[run.replica] = threading.Event()
        return replica

    # Jobs -------------------------------------------------------------------------------------------------------------

    def start(self, run: ReplicaRun) -> None:
        """Open an engine."""
        name = run.replica
        try:
            if (stopping := self._stopping.get(name)) is not None:
                stopping.wait()
            # Its thread may have begun late: see `FleetRunner.delayed`.
            if not self._is_wanted(run):
                return
            replica = open_replica(self.members[name], self._canary)
            try:
                self._require_same(name, replica)
            except BaseException:
                replica.close(by_force=True)
                raise
        except BaseException as error:
            if self._common is None:
                self.failures[name] = error
            self._report(self._state.died, run, why=f"it did not start: {message(error)}")
            return
        with self._lock:
            wanted = self._is_wanted(run)
            if wanted:
                self.running[run] = replica
        if wanted:
            most = None if replica.capabilities.concurrent_calls else 1
            self._report(self._state.opened, run, most_dispatches=most)
        else:
            replica.close(by_force=True)

    def stop(self, run: ReplicaRun, replica: OpenReplica, by_force: bool) -> None:
        """End an engine that `begin_stop` returned."""
        try:
            replica.close(by_force)
        finally:
            self._stopping[run.replica].set()

    def load(self, run: ReplicaRun, epoch: int) -> None:
        """Load the weights of an epoch."""
        replica = self.running.get(run)
        if replica is None:
            return
        try:
            with self._lock:
                updates = self._weights.to(epoch, self._state.replicas[run.replica].weights)
            for update in updates:
                if update.by_owner and run not in self._witnesses and self._references.get(epoch) is None:
                    raise EngineError(
                        "the owner of the weights has changed them before it was started, and nothing shows whether it "
                        "has them; use update_weights on the fleet"
                    )
                replica.load(update)
        except (InvalidRequestError, CapabilityError) as error:
            self._report(self._state.load_refused, run, epoch, why=message(error))
        except BaseException as error:
            if isinstance(error, StaleWeightsError):
                self.disagreed.add(run.replica)
            self._report(self._state.died, run, why=f"it did not load its weights: {message(error)}")
        else:
            self._report(self._state.loaded, run, epoch)

    def ask(self, run: ReplicaRun, epoch: int) -> None:
        """Ask the canary of an epoch. The first replica to answer says what the others are compared with."""
        replica = self.running.get(run)
        if replica is None:
            return
        try:
            expected = self._references.get(epoch)
            said = replica.look(expected)
            with self._lock:
                known = None if said is None else self._references.setdefault(epoch, said)
            if expected is None and known is not said:
                replica.look(known)
        except StaleWeightsError as error:
            self.disagreed.add(run.replica)
            self._report(self._state.canary, run, epoch, False, why=message(error))
        except BaseException as error:
            self._report(self._state.died, run, why=f"its canary could not ask it: {message(error)}")
        else:
            self._report(self._state.canary, run, epoch, True)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _is_wanted(self, run: ReplicaRun) -> bool:
        """Return whether an engine that is being started is still to be opened."""
        with self._lock:
            known = self._state.replicas[run.replica]
            return known.run == run and known.state in STARTING and not self.ended

    def _require_same(self, name: str, replica: OpenReplica) -> None:
        """Refuse an engine that, started after the fleet was opened, is not like those that it was opened with."""
        found = facts(replica.backend)
        if self._common is None:
            self._facts[name] = found, replica.capabilities
        else:
            first = next(iter(self.members))
            require_alike(f"the fleet, as {first} did,", self._facts[first][0], name, found)
            if capabilities_of_all([self._common, replica.capabilities]) != self._common:
                raise invalid("replicas", f"{name} can do less than when the fleet was opened")
        self.tokenizer.adopt(replica.tokenizer)
        self._last_tokenizer = replica.tokenizer

    def _tokenizers(self) -> list[Any]:
        return [replica.tokenizer for replica in list(self.running.values())]

    def _each_tokenizer(self) -> Iterator[Any]:
        """Yield tokenizers, that of an engine that was lost among them: it may live in this process."""
        yield from self._tokenizers()
        yield self._last_tokenizer
        for replica in self.each_running():
            yield replica.tokenizer


def open_replica(member: Member, canary: Canary) -> OpenReplica:
    """Open an engine. One that does not fit is closed again."""
    plugin = member.open()
    try:
        return OpenReplica(member, plugin, canary)
    except BaseException as error:
        _log.info("%s does not fit: %s", member.name, brief(message(error)))
        with suppress(Exception):
            plugin.close(CloseRequest())
        raise


class KeptWeights:
    """The updates that lead from the weights that every engine is opened with to those of an epoch.

    A state dict may hold only some of the parameters. So the state dicts since the last path are kept as one, with the
    latest tensor of each name. A path holds all base weights: the updates before it are forgotten, except those of
    adapters. Of each adapter, the last is kept.
    """

    def __init__(self) -> None:
        self._all: dict[int, tuple[WeightUpdate, ...]] = {0: ()}
        # The last step to an epoch: the epoch before it, and the update.
        self._steps: dict[int, tuple[int, WeightUpdate]] = {}
        self._were_in_force = {0}

    def begin(self, epoch: int, before: int, update: WeightUpdate) -> None:
        """Keep an update from the epoch in force to another one, in tensors that only we change; see `own_copy`."""
        self._steps[epoch] = before, update
        self._all[epoch] = _joined(self._all[before], update)

    def end(self, epoch: int) -> None:
        """Note which epoch is in force now, and forget the updates that lead to others."""
        self._all = {epoch: self._all[epoch]}
        self._steps = {each: step for each, step in self._steps.items() if each == epoch}
        self._were_in_force.add(epoch)

    def to(self, epoch: int, held: int | None) -> Sequence[WeightUpdate]:
        """Return the updates that an engine has to load, in order, to get from the weights held to those of an epoch.

        Raises:
            EngineError: loading does not help; it has to be opened again.
        """
        needed = self._all.get(epoch)
        if not needed or held not in self._were_in_force:
            raise EngineError("only a new start brings back the weights that it was opened with")
        before, update = self._steps[epoch]
        return (update,) if held == before else needed


def own_copy(update: WeightUpdate) -> WeightUpdate:
    """Return new weights that the caller cannot change: engines that are started later load them, too.

    A state dict is copied to the CPU, because a trainer goes on changing the tensors that it has handed over.
    """
    if update.state_dict is None:
        return update
    copied = {
        name: whole_tensor(value).to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in update.state_dict.items()
    }
    return replace(update, state_dict=copied)


def _joined(earlier: tuple[WeightUpdate, ...], update: WeightUpdate) -> tuple[WeightUpdate, ...]:
    if update.unloads:
        # An engine that is started later has to have an adapter before it can unload it.
        return (*earlier, update)
    if update.adapter is not None:
        return (*(each for each in earlier if each.adapter != update.adapter), update)
    base = tuple(each for each in earlier if each.adapter is None)
    adapters = tuple(each for each in earlier if each.adapter is not None)
    if update.state_dict is None:
        return (update, *adapters)
    last = base[-1].state_dict if base else None
    if last is None:
        return (*base, update, *adapters)
    return (*base[:-1], replace(update, state_dict={**last, **update.state_dict}), *adapters)
