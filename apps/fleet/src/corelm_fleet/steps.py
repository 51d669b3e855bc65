"""`FleetSteps`: steps that the events of `state.py` share. A replica advances or dies, or an update ends."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable

from corelm.errors import EngineError, first_few
from corelm.validate import invalid
from corelm_fleet.records import (
    STARTING,
    TRANSITIONS,
    Abandon,
    AskCanary,
    Decision,
    Deliver,
    Fail,
    FleetLimits,
    Life,
    Load,
    State,
    Stop,
    Updated,
    UpdateFailed,
)
from corelm_fleet.rows import Flight, Replica, Rows, Strike


class FleetSteps:
    """The part of `FleetState` that its events share.

    Attributes:
        limits: how patient the fleet is.
        replicas: every replica by name, those that are gone included.
        rows: the rows that have no answer yet, and the flights that they are in.
        epoch: the weights in force.
        updating: the epoch that an update is loading; None while the gate is open.
        asleep: whether the replicas sleep, so that none may be started.
    """

    def __init__(self, limits: FleetLimits | None = None) -> None:
        self.limits = limits or FleetLimits()
        self.replicas: dict[str, Replica] = {}
        self.rows = Rows(self.limits.deaths)
        self.epoch = 0
        self.updating: int | None = None
        self.asleep = False
        self._epochs = itertools.count(1)
        self._states: Counter[State] = Counter()
        # Replicas that take accused rows only; replicas that an update waits for; since when no replica is healthy.
        self._reserved: dict[str, None] = {}
        self._pending: dict[str, None] = {}
        self._dark_since: float | None = None
        self._takers: frozenset[str] = frozenset()
        self._decisions: list[Decision] = []

    @property
    def _target(self) -> int:
        """The weights that replicas have to have."""
        return self.epoch if self.updating is None else self.updating

    def _open(self, replica: Replica) -> bool:
        return self.updating is None and replica.state is State.HEALTHY

    def _replica(self, name: str) -> Replica:
        if name not in self.replicas:
            raise invalid("replica", f"there is no replica {name!r}; there are {', '.join(self.replicas) or 'none'}")
        return self.replicas[name]

    def _current(self, life: Life) -> Replica | None:
        """Return the replica if this is its current life."""
        replica = self.replicas.get(life.replica)
        return replica if replica is not None and replica.life == life else None

    def _done(self, asked: Load | AskCanary) -> Replica | None:
        """Return the replica if it was asked for this, and note that it is done."""
        replica = self._current(asked.life)
        if replica is None or replica.asked != asked:
            return None
        replica.asked, replica.misses = None, 0
        return replica

    def _move(self, replica: Replica, state: State, now: float, why: str = "") -> None:
        """Change the state of a replica."""
        assert (replica.state, state) in TRANSITIONS, f"{replica.life}: {replica.state} to {state}"
        self._states[replica.state] -= 1
        self._states[state] += 1
        replica.state, replica.since, replica.asked = state, now, None
        replica.why = why or ("" if state is State.HEALTHY else replica.why)
        if state in (State.STALE, State.HEALTHY):
            replica.misses = 0
        if state in (State.DEAD, State.GONE):
            replica.weights = replica.agreed = replica.refused = None
        if state not in (*STARTING, State.STALE):
            # An update does not wait for it any longer: it has the weights, or cannot load them.
            self._pending.pop(replica.name, None)
        self.rows.changed = True

    def _advance(self, replica: Replica, now: float) -> None:
        """Take the next step towards HEALTHY, or out of the fleet, if nothing is under way."""
        if replica.state is State.DRAINING and not replica.flights:
            self._leave(replica, now, "it was told to leave")
        if replica.state is State.HEALTHY and replica.weights != self._target and not replica.flights:
            self._move(replica, State.STALE, now)
        if replica.state is not State.STALE or replica.asked is not None or replica.refused is not None:
            return
        if replica.weights == replica.agreed == self._target:
            self._move(replica, State.HEALTHY, now)
            return
        replica.asked = (AskCanary if replica.weights == self._target else Load)(replica.life, self._target)
        replica.asked_at = now
        self._decisions.append(replica.asked)

    def _die(self, replica: Replica, now: float, why: str) -> None:
        """Blame its rows, end it, and start it again later, unless that was tried too often."""
        if replica.state in (State.DEAD, State.GONE):
            return
        self._take_rows(replica, why, final=True)
        if replica.state is State.HEALTHY and now - replica.since > self.limits.longest_backoff:
            replica.restarts = 0
        if replica.state is State.DRAINING:
            self._leave(replica, now, why)
            return
        self._move(replica, State.DEAD, now, why)
        self._decisions.append(Stop(replica.life))
        replica.errors = replica.misses = 0
        replica.restarts += 1
        if replica.restarts > self.limits.restarts:
            self._leave(replica, now, f"it was started too often without answering; the last time: {why}")
        wait = self.limits.backoff * 2.0 ** min(replica.restarts - 1, 60)
        replica.retry_at = now + min(wait, self.limits.longest_backoff)

    def _leave(self, replica: Replica, now: float, why: str) -> None:
        if replica.state is not State.DEAD:
            self._decisions.append(Stop(replica.life))
        self._move(replica, State.GONE, now, why)

    def _take_rows(self, replica: Replica, why: str, final: bool) -> None:
        """Take all unanswered rows from a replica and blame the one on trial or, without a trial, all of them."""
        trial = replica.trial
        # The rows that were sent last are the likeliest cause, so they are tried first.
        for flight in sorted(replica.flights.values(), key=lambda each: each.sent, reverse=True):
            rows = tuple(flight.rows)
            if not final:
                self._decisions.append(Abandon(flight.life, flight.number, rows))
            for number in rows:
                if trial is None or flight is trial:
                    self._blame(number, Strike(replica.life, why, final))
                else:
                    self.rows.wait(number)

    def _blame(self, number: int, strike: Strike) -> None:
        error = self.rows.blame(number, strike)
        if error is not None:
            self._decisions.append(Fail(number, error))

    def _deliver(self, flight: Flight, rows: Iterable[int], now: float) -> None:
        count = tuple(number for number in rows if number in flight.rows)
        for number in count:
            self.rows.finish(number)
        if count:
            self._decisions.append(Deliver(count, flight.epoch))
        self._advance(flight.replica, now)

    def _fail(self, rows: Iterable[int], why: str, usable: bool | None) -> None:
        states = first_few([f"{each.life} is {each.state.value}: {each.why}" for each in self.replicas.values()])
        for number in list(rows):
            self.rows.finish(number)
            error = EngineError(f"row {number}: {why}. {states}", usable=usable, problems={number: why})
            self._decisions.append(Fail(number, error))

    def _reserve(self) -> None:
        """Keep up to half of the healthy replicas for accused rows while such rows wait."""
        if not self.rows.accused and not self._reserved:
            return
        replicas = [self.replicas[name] for name in self._reserved]
        kept = [each for each in replicas if each.state is State.HEALTHY and each.trial is None]
        room = max(1, self._states[State.HEALTHY] // 2) - self.rows.trying
        wanted = max(0, min(len(self.rows.accused), room))
        if len(kept) < wanted:
            free = [each for each in self.replicas.values() if each.state is State.HEALTHY and each.trial is None]
            others = [each for each in free if each.name not in self._reserved]
            kept += heapq.nsmallest(wanted - len(kept), others, key=lambda each: len(each.flights))
        reserved = {each.name: None for each in kept[:wanted]}
        if reserved != self._reserved:
            self._reserved = reserved
            self.rows.changed = True

    def _end_update(self, now: float) -> None:
        """End an update that waits for no replica and no row."""
        if self.updating is None or self._pending or self.rows.flights:
            return
        target = self.updating
        replicas = [each for each in self.replicas.values() if each.state is not State.GONE]
        ready = [each for each in replicas if each.state is State.HEALTHY and each.weights == target]
        if not ready:
            # A replica that came back during the update may have the new weights soon.
            self._pending = {each.name: None for each in replicas if each.asked is not None}
            if self._pending:
                return
        self.updating = None
        missed = [each for each in replicas if each not in ready]
        reasons = {each.name: each.refused or each.why or f"it is {each.state.value}" for each in missed}
        refused = [each for each in replicas if each.refused is not None]
        if ready:
            self.epoch = target
            self._decisions.append(Updated(target, reasons))
            for replica in refused:
                self._die(replica, now, f"it refused weights that others have loaded: {replica.refused}")
        else:
            weights = {each.name: each.weights for each in replicas}
            self._decisions.append(UpdateFailed(bool(refused), reasons, weights))
        for replica in replicas:
            replica.refused = None
            self._advance(replica, now)
        self.rows.changed = True

    def _decided(self, now: float) -> list[Decision]:
        self._end_update(now)
        self._reserve()
        if self.rows.all and self._states[State.GONE] == len(self.replicas):
            self._fail(self.rows.all, "no replica is left", usable=False)
        decisions, self._decisions = self._decisions, []
        return decisions
