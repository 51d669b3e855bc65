"""`FleetRunner`: carries out what the state machine decides about rows, replicas and weights.

Every event goes to the state machine through `do`, which holds the lock. An engine may take long, so each job runs on a
separate thread; no engine is called while the lock is held.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from corelm.application import join, uninterrupted
from corelm.errors import BackendAsleepError, BackendClosedError, brief, message
from corelm.spec import WeightUpdate
from corelm_fleet.canary import Canary
from corelm_fleet.flights import NO_THREAD, Flights, Flying
from corelm_fleet.lives import Lives
from corelm_fleet.records import (
    Abandon,
    AskCanary,
    Decision,
    Deliver,
    Fail,
    FleetLimits,
    Life,
    Load,
    Start,
    State,
    Stop,
    Updated,
    UpdateFailed,
)
from corelm_fleet.replica import Member, OpenReplica
from corelm_fleet.routing import Policy
from corelm_fleet.status import ReplicaStatus, Throughput

_log = logging.getLogger(__name__)

#: Seconds without a reply after which a health check is missed.
_HEALTH = 5.0
#: Seconds without a reply to a health check after which an engine is not asked to close, but ended if that can be done.
_SLOW = 1.0
#: Seconds that closing waits for threads after the engines were closed.
_PATIENCE = 2.0


class FleetRunner(Flights):
    """A fleet at work.

    Args:
        members: how each replica is opened.
        opened: the replicas, which are open.
        limits: how patient the fleet is.
        canary: how canaries compare.
        policy: chooses the replica of a group of rows.

    Attributes:
        state: the state machine.
        lives: the engines.
        closed: whether the fleet was closed.

    Raises:
        InvalidRequestError: two replicas would not answer alike.
    """

    def __init__(
        self,
        members: Sequence[Member],
        opened: Mapping[str, OpenReplica],
        limits: FleetLimits,
        canary: Canary,
        policy: Policy,
    ) -> None:
        super().__init__(limits, policy)
        self._process = os.getpid()
        self.lives = Lives(members, opened, canary, self.state, self._lock, self.do)
        self._checks: dict[Life, float] = {}
        self._updates: SimpleQueue[Updated | UpdateFailed | Exception] | None = None
        for name, replica in opened.items():
            self._speeds[name] = Throughput(time.monotonic())
            most = None if replica.capabilities.concurrent_calls else 1
            self.do(self.state.join, name, most_flights=most)

    # For the hooks ----------------------------------------------------------------------------------------------------

    def do(self, event: Callable[..., list[Decision]], *args: Any, **named: Any) -> None:
        with self._lock:
            if not self.closed:
                self._obey(event(*args, now=time.monotonic(), **named))
                self._go_on()

    def update(self, update: WeightUpdate) -> SimpleQueue[Updated | UpdateFailed | Exception]:
        """Begin an update, and return the queue that gets its end.

        Raises:
            EngineError: another update is under way.
            BackendClosedError: the fleet is closed.
        """
        with self._lock:
            if self.closed:
                raise BackendClosedError("the fleet is closed")
            decisions = self.state.update(time.monotonic())
            ended = self._updates = SimpleQueue[Updated | UpdateFailed | Exception]()
            if self.state.updating is not None:
                self.lives.begin_update(self.state.updating, update)
            self._obey(decisions)
            self._go_on()
            return ended

    def retire(self) -> None:
        """End all calls with an error, and start no engine any more, because the program ends."""
        if os.getpid() != self._process or self.closed:
            # A fork has none of the threads, one of which may have held the lock.
            return
        with self._lock:
            self.lives.ended = True
            for call in {id(each): each for each in self._calls.values()}.values():
                call.fail_all(BackendClosedError("the program ends"))
                self._drop(call)
            self._go_on()

    def close(self) -> None:
        """End all calls with an error, and close all engines."""
        # Only this part must not be interrupted half-way. A thread that `threading` did not start does it, and joining
        # another thread there would leave a trace of it.
        for thread in uninterrupted(self._begin_to_close):
            thread.join()
        join([each for each in self._threads if each is not threading.current_thread()], _PATIENCE)

    def _begin_to_close(self) -> list[threading.Thread]:
        """End all calls, and return the threads that close the engines."""
        with self._lock:
            if self.closed:
                return []
            self.closed = self.lives.ended = True
            for call in {id(each): each for each in self._calls.values()}.values():
                call.fail_all(BackendClosedError("the fleet was closed"))
            if self._updates is not None:
                self._updates.put(BackendClosedError("the fleet was closed during the update"))
            late = time.monotonic() - _SLOW
            hung = {self.lives.running.get(life) for life, since in self._checks.items() if since < late}
            replicas = self.lives.replicas()
            self.lives.running.clear()
        closing = [
            threading.Thread(target=replica.close, args=(replica in hung,), name="corelm-fleet-close", daemon=True)
            for replica in replicas
        ]
        for thread in closing:
            thread.start()
        return closing

    def join(self, member: Member) -> None:
        """Begin to open one more engine.

        Raises:
            BackendClosedError: the fleet is closed.
            BackendAsleepError: the fleet sleeps.
            InvalidRequestError: a replica of this name has not left.
        """
        with self._lock:
            if self.closed:
                raise BackendClosedError("the fleet is closed")
            if self.state.asleep:
                raise BackendAsleepError("an engine cannot join a fleet that sleeps; call backend.wake() first")
            one_call = any(not each.capabilities.concurrent_calls for each in self.lives.replicas())
            now = time.monotonic()
            decisions = self.state.join(member.name, now, 1 if one_call else None)
            self.lives.admit(member)
            self._speeds[member.name] = Throughput(now)
            self._obey(decisions)
            self._go_on()

    def label(self) -> str:
        """Return the label of the weights in force, as an engine that has them knows it."""
        labels = [
            replica.label
            for life, replica in list(self.lives.running.items())
            if self.state.replicas[life.replica].weights == self.state.epoch
        ]
        return labels[0] if labels else ""

    def status(self) -> list[ReplicaStatus]:
        """Return how each replica is doing."""
        now = time.monotonic()
        with self._lock:
            return [
                ReplicaStatus(
                    name=name,
                    state=each.state.value,
                    epoch=each.weights,
                    rows=sum(len(flight.rows) for flight in each.flights.values()),
                    tokens_per_second=self._speeds[name].per_second(now),
                    starts=each.life.number,
                    why=each.why,
                )
                for name, each in self.state.replicas.items()
            ]

    def look_around(self) -> None:
        """Check the health of every engine, and do what is due. A thread of the fleet calls it every second."""
        now = time.monotonic()
        for life, replica in list(self.lives.running.items()):
            since = self._checks.setdefault(life, now)
            if since == now:
                self._spawn(self._check, life, replica, otherwise=partial(self._unchecked, life))
            elif now - since > _HEALTH:
                self.do(self.state.missed, life, why=f"it did not reply to a health check within {_HEALTH:g} s")
        self.do(self.state.tick)

    # Decisions --------------------------------------------------------------------------------------------------------

    def _obey(self, decisions: Iterable[Decision], flying: Flying | None = None, outcome: Any = None) -> None:
        for each in decisions:
            match each:
                case Start(life):
                    if not self.lives.ended:
                        self._spawn(self.lives.start, life, otherwise=partial(self._no_thread, life))
                case Stop(life):
                    self._stop(life)
                case Load(life, epoch):
                    self._spawn(self.lives.load, life, epoch, otherwise=partial(self._no_thread, life))
                case AskCanary(life, epoch):
                    self._spawn(self.lives.ask, life, epoch, otherwise=partial(self._no_thread, life))
                case Deliver(rows, _):
                    assert flying is not None
                    self._deliver(flying, rows, outcome)
                case Fail(row, error):
                    self._fail(row, error)
                case Abandon(_, number, rows):
                    for row in rows:
                        self._unload(row)
                    if (abandoned := self._flying.get(number)) is not None:
                        self._abort(abandoned, rows, partial(self._is_flying, number))
                case Updated() | UpdateFailed():
                    self.lives.end_update(self.state.epoch)
                    if self._updates is not None:
                        self._updates.put(each)
                        self._updates = None

    def _stop(self, life: Life) -> None:
        for row in [row for row, (where, _) in self._work.items() if where == life]:
            del self._work[row]
        self._loads.forget(life.replica)
        self._checks.pop(life, None)
        known = self.state.replicas[life.replica]
        by_force = known.state is State.DEAD
        if by_force:
            _log.warning("%s was lost: %s", life, brief(known.why))
        replica = self.lives.begin_stop(life)
        if replica is not None:
            self._spawn(self.lives.stop, life, replica, by_force)

    def _running(self, life: Life) -> OpenReplica:
        return self.lives.running[life]

    # Threads ----------------------------------------------------------------------------------------------------------

    def _is_flying(self, number: int) -> bool:
        return number in self._flying

    def _unchecked(self, life: Life) -> None:
        self._checks.pop(life, None)

    def _check(self, life: Life, replica: OpenReplica) -> None:
        why, ended = "", False
        try:
            if not replica.health():
                ended = replica.ended
                why = "it has ended" if ended else "it says that it cannot serve"
            elif changed := self._was_silent(life, replica) and replica.changed():
                why, ended = f"it did not answer for a while, and then as another one: {changed}", True
        except BaseException as error:
            why = message(error)
        self._checks.pop(life, None)
        if why:
            self.do(self.state.died if ended else self.state.missed, life, why=why)
        else:
            self.do(self.state.heard, life)

    def _was_silent(self, life: Life, replica: OpenReplica) -> bool:
        """Return whether an engine that serves has missed health checks, and has no call that shows that it went on."""
        with self._lock:
            known = self.state.replicas[life.replica]
            silent = known.life == life and known.misses > 0 and known.state in (State.HEALTHY, State.SUSPECT)
            return silent and not any(flying.replica is replica for flying in self._flying.values())

    def _no_thread(self, life: Life) -> None:
        self._obey(self.state.died(life, time.monotonic(), message(NO_THREAD)))
