"""What happens to rows, replicas and weights when engines start, stall, die, restart and load weights.

The machine has no threads, no clock and no engine. Each event is a method; it takes the time and returns the decisions
that its owner has to carry out, in their order. The owner holds one lock around every method. These rules always hold:

1.  A row is answered exactly once, or fails with an `EngineError` that names it. When a replica dies, only the rows
    that it had not answered are sent again, elsewhere. What a replica returns later for a row that was taken from it is
    discarded.
2.  A request that a replica refuses does not count against the replica. A row that was in flight at a death is retried
    in isolation: it is sent alone, and to a replica that has survived the rows it has. If that replica dies, only this
    row is blamed; if it has no isolated retry, every unanswered row is. A row that is blamed for `deaths` deaths fails.
3.  A replica gets rows only while its weights are the current ones. `update` closes the gate; each replica finishes its
    rows, loads and is asked for its canary; then the gate opens for all together. No row of an older epoch is in flight
    when `Updated` is decided.
4.  A replica gets rows only after its canary has agreed.
5.  Every wait has a limit. If no replica is left, all rows fail at once.

The states, their transitions, the limits and the decisions are in `records.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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
    Load,
    ReplicaRun,
    Start,
    State,
    Stop,
    Updated,
    UpdateFailed,
)


class Strike(NamedTuple):
    """A replica was lost, or failed a call, while it had a row.

    Attributes:
        run: the replica.
        why: what happened to it.
        final: False while the replica is only a suspect. The strike is withdrawn if the replica is heard from again.
    """

    run: ReplicaRun
    why: str
    final: bool


@dataclass(slots=True, eq=False)
class Row:
    """A row that has no answer yet.

    Attributes:
        dispatch: the dispatch that has it; None while it waits.
        work: how much work it is for the replica that has it.
        strikes: the losses while it was in flight.
    """

    dispatch: Dispatch | None = None
    work: float = 0.0
    strikes: list[Strike] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Dispatch:
    """Rows that one call took to a replica.

    Attributes:
        number: its number; none is used twice.
        replica: where it went.
        run: the run of the replica at that time.
        sent: when it was sent.
        rows: its rows that have no answer yet.
        settled: whether the replica has survived it: it was heard from long enough afterwards.
    """

    number: int
    replica: Replica
    run: ReplicaRun
    sent: float
    rows: dict[int, None]
    settled: bool = False


@dataclass(slots=True, eq=False)
class Replica:
    """A replica, as the state machine knows it.

    Attributes:
        run: its current start.
        state: its state.
        since: when it got into this state.
        most_dispatches: how many dispatches it takes at once; None sets no limit.
        weights: the epoch of its weights; None if that is not known.
        agreed: the epoch for which its canary has agreed; None if it has not.
        dispatches: the dispatches that it has.
        work: the work of the rows that it has.
        isolated: the dispatch of an isolated retry; None once the replica has survived it.
        asked: what it was asked to do on its way to HEALTHY and has not done yet.
        asked_at: when it was asked.
        refused: why it refused the weights of the update under way.
        misses: health checks missed in a row.
        errors: calls failed in a row.
        restarts: restarts since it last answered a row, or was healthy for long.
        retry_at: when it may be started again.
        why: why it last became SUSPECT, DEAD or GONE; for people.
    """

    run: ReplicaRun
    state: State
    since: float
    most_dispatches: int | None = None
    weights: int | None = None
    agreed: int | None = None
    dispatches: dict[int, Dispatch] = field(default_factory=dict)
    work: float = 0.0
    isolated: Dispatch | None = None
    asked: Load | AskCanary | None = None
    asked_at: float = 0.0
    refused: str | None = None
    misses: int = 0
    errors: int = 0
    restarts: int = 0
    retry_at: float = 0.0
    why: str = ""

    @property
    def name(self) -> str:
        return self.run.replica

    @property
    def room(self) -> bool:
        """Whether it takes another dispatch."""
        return self.most_dispatches is None or len(self.dispatches) < self.most_dispatches

    @property
    def may_isolate(self) -> bool:
        """Whether it can take an isolated retry: if it then dies, nothing else in it is likely to be the cause."""
        return self.isolated is None and self.room and all(dispatch.settled for dispatch in self.dispatches.values())


class Rows:
    """Every row that has no answer yet, and where it is.

    Attributes:
        deaths: how many strikes make a row fail.
        all: the rows by number.
        dispatches: the dispatches that have rows, by number.
        fresh: the rows that wait and may share a dispatch, in order.
        accused: the rows that wait for an isolated retry, the likeliest cause of a loss first.
        isolated: how many replicas have an isolated retry.
    """

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths
        self.all: dict[int, Row] = {}
        self.dispatches: dict[int, Dispatch] = {}
        self.fresh: dict[int, None] = {}
        self.accused: dict[int, None] = {}
        self.isolated = 0
        self._numbers = itertools.count()

    def add(self, number: int) -> None:
        """Add a row that has to be answered."""
        assert number not in self.all
        self.all[number] = Row()
        self.fresh[number] = None

    def depart(self, replica: Replica, rows: Mapping[int, float], now: float, isolated: bool) -> Dispatch:
        """Move waiting rows into a new dispatch on a replica. `rows` has the work of each."""
        number = next(self._numbers)
        dispatch = Dispatch(number, replica, replica.run, now, dict.fromkeys(rows))
        self.dispatches[number] = replica.dispatches[number] = dispatch
        if isolated:
            replica.isolated = dispatch
            self.isolated += 1
        for row, work in rows.items():
            (self.accused if isolated else self.fresh).pop(row)
            self.all[row].dispatch, self.all[row].work = dispatch, work
            replica.work += work
        return dispatch

    def settle(self, dispatch: Dispatch) -> None:
        """Note that a replica has survived a dispatch."""
        dispatch.settled = True
        self._end_isolation(dispatch)

    def finish(self, number: int) -> None:
        """Remove a row that is answered, failed or cancelled."""
        self._land(number)
        del self.all[number]
        self.fresh.pop(number, None)
        self.accused.pop(number, None)

    def wait(self, number: int) -> None:
        """Take a row out of its dispatch, to be sent again."""
        self._land(number)
        (self.accused if self.all[number].strikes else self.fresh)[number] = None

    def blame(self, number: int, strike: Strike) -> EngineError | None:
        """Give a row in flight a strike: it waits for an isolated retry. Return the error if it has too many."""
        strikes = self.all[number].strikes
        strikes.append(strike)
        if len(strikes) < self.deaths:
            self.wait(number)
            return None
        self.finish(number)
        said = "; ".join(f"{each.run}: {each.why}" for each in strikes)
        why = f"it was in flight when {len(strikes)} replicas were lost, so it is not sent to another one. {said}"
        return EngineError(f"row {number}: {why}", usable=True, problems={number: why})

    def withdraw(self, run: ReplicaRun) -> None:
        """Withdraw the strikes for the loss of a replica that was heard from again."""
        for number, row in self.all.items():
            row.strikes = [strike for strike in row.strikes if strike.final or strike.run != run]
            if not row.strikes and number in self.accused:
                del self.accused[number]
                self.fresh[number] = None

    def waiting(self) -> Iterable[int]:
        """Return the rows that are not in flight."""
        return [*self.accused, *self.fresh]

    def _land(self, number: int) -> None:
        """Take a row out of its dispatch, if it is in one."""
        row = self.all[number]
        dispatch, row.dispatch = row.dispatch, None
        if dispatch is None:
            return
        del dispatch.rows[number]
        dispatch.replica.work -= row.work
        if not dispatch.rows:
            del self.dispatches[dispatch.number], dispatch.replica.dispatches[dispatch.number]
            self._end_isolation(dispatch)

    def _end_isolation(self, dispatch: Dispatch) -> None:
        if dispatch.replica.isolated is dispatch:
            dispatch.replica.isolated = None
            self.isolated -= 1


class FleetState:
    """The state of a fleet.

    Attributes:
        limits: how patient the fleet is.
        replicas: every replica by name, those that are gone included.
        rows: the rows that have no answer yet, and the dispatches that they are in.
        epoch: the weights in force.
        updating: the epoch that an update is loading; None while the gate is open.
        asleep: whether the replicas sleep, so that none may be started: others use the memory that it would take.
    """

    def __init__(self, limits: FleetLimits | None = None) -> None:
        self.limits = limits or FleetLimits()
        self.replicas: dict[str, Replica] = {}
        self.rows = Rows(self.limits.deaths)
        self.epoch = 0
        self.updating: int | None = None
        self.asleep = False
        self._epochs = itertools.count(1)
        # Replicas that take accused rows only; replicas that an update waits for; since when no replica is healthy.
        self._reserved: dict[str, None] = {}
        self._pending: dict[str, None] = {}
        self._dark_since: float | None = None
        self._decisions: list[Decision] = []

    # Replicas ---------------------------------------------------------------------------------------------------------

    def join(self, name: str, now: float) -> list[Decision]:
        """Add a replica, which has to be started. A name can be used again when its replica is gone.

        Raises:
            InvalidRequestError: a replica of this name is not gone.
        """
        before = self.replicas.get(name)
        if before is not None and before.state is not State.GONE:
            raise invalid("replica", f"there is already a replica {name!r}; choose another name")
        run = ReplicaRun(name, 1 if before is None else before.run.number + 1)
        self.replicas[name] = Replica(run, State.JOINING, now)
        self._decisions.append(Start(run))
        return self._decided(now)

    def drain(self, name: str, now: float) -> list[Decision]:
        """Let a replica finish its rows and leave. One that does not answer loses its rows and leaves at once.

        Raises:
            InvalidRequestError: there is no such replica.
        """
        replica = self.replicas.get(name)
        if replica is None:
            raise invalid("replica", f"there is no replica {name!r}; there are {', '.join(self.replicas)}")
        if replica.state is State.HEALTHY:
            self._move(replica, State.DRAINING, now)
            self._advance(replica, now)
        elif replica.state not in (State.GONE, State.DRAINING):
            self._take_rows(replica, "it was told to leave while it did not answer", final=True)
            self._leave(replica, now, "it was told to leave")
        return self._decided(now)

    def opened(self, run: ReplicaRun, now: float, most_dispatches: int | None = None) -> list[Decision]:
        """Note that a replica has started, and how many dispatches it takes. It has the weights of epoch 0."""
        replica = self._current(run)
        if replica is not None and replica.state in STARTING:
            replica.weights, replica.most_dispatches = 0, most_dispatches
            self._move(replica, State.LOADING, now)
            self._advance(replica, now)
        return self._decided(now)

    def died(self, run: ReplicaRun, now: float, why: str) -> list[Decision]:
        """Note that a replica has ended, did not start, or failed to load weights, and say why."""
        replica = self._current(run)
        if replica is not None:
            self._die(replica, now, why)
        return self._decided(now)

    def heard(self, run: ReplicaRun, now: float) -> list[Decision]:
        """Note that a replica has passed a health check."""
        replica = self._current(run)
        if replica is not None:
            replica.misses = 0
            for dispatch in replica.dispatches.values():
                if dispatch.sent + self.limits.trial <= now:
                    self.rows.settle(dispatch)
            if replica.state is State.SUSPECT:
                self.rows.withdraw(run)
                outdated = replica.weights != self._target and not replica.dispatches
                self._move(replica, State.LOADING if outdated else State.HEALTHY, now)
                self._advance(replica, now)
        return self._decided(now)

    def missed(self, run: ReplicaRun, now: float, why: str) -> list[Decision]:
        """Note that a replica has missed a health check, or that a call to it takes suspiciously long."""
        replica = self._current(run)
        if replica is not None:
            replica.misses += 1
            if replica.misses >= self.limits.misses:
                # A replica that loads weights may be too busy to reply, though not for ever.
                busy = replica.state is State.LOADING and now - replica.asked_at < self.limits.give_up
                if replica.state is State.HEALTHY:
                    self._move(replica, State.SUSPECT, now, why)
                elif replica.state is State.DRAINING or (replica.state is State.LOADING and not busy):
                    self._die(replica, now, why)
        return self._decided(now)

    # Weights ----------------------------------------------------------------------------------------------------------

    def update(self, now: float) -> list[Decision]:
        """Close the gate and begin to load new weights everywhere. It ends with `Updated` or `UpdateFailed`.

        Raises:
            EngineError: another update has not ended.
        """
        if self.updating is not None:
            raise EngineError("update_weights: an update is under way; call again when it has ended", usable=True)
        self.updating = next(self._epochs)
        replicas = list(self.replicas.values())
        # An update waits for replicas that are being started only if no other can load now.
        able = [each.name for each in replicas if each.state in (State.LOADING, State.HEALTHY)]
        self._pending = dict.fromkeys(able or [each.name for each in replicas if each.state is not State.GONE])
        for replica in replicas:
            if replica.state is State.SUSPECT:
                # Otherwise it could return answers of the old weights after the update.
                self._take_rows(replica, "it did not answer when an update began", final=False)
            self._advance(replica, now)
        return self._decided(now)

    def loaded(self, run: ReplicaRun, epoch: int, now: float) -> list[Decision]:
        """Note that a replica has loaded the weights of an epoch."""
        replica = self._done(Load(run, epoch))
        if replica is not None:
            # The canary has to agree again, also with weights that it agreed with before.
            replica.weights, replica.agreed = epoch, None
            self._advance(replica, now)
        return self._decided(now)

    def load_refused(self, run: ReplicaRun, epoch: int, now: float, why: str) -> list[Decision]:
        """Note that a replica refused weights with an `InvalidRequestError` or `CapabilityError` and kept its own."""
        replica = self._done(Load(run, epoch))
        if replica is not None:
            if epoch == self.updating:
                # Whether it or the weights are at fault is known when the others have tried.
                replica.refused = why
                self._pending.pop(replica.name, None)
            elif epoch == self._target:
                self._die(replica, now, f"it refused the current weights: {why}")
            self._advance(replica, now)
        return self._decided(now)

    def canary(self, run: ReplicaRun, epoch: int, agreed: bool, now: float, why: str = "") -> list[Decision]:
        """Note what the canary of an epoch said on a replica."""
        replica = self._done(AskCanary(run, epoch))
        if replica is not None:
            if agreed:
                replica.agreed = epoch
            else:
                self._die(replica, now, f"its canary disagreed: {why}")
            self._advance(replica, now)
        return self._decided(now)

    def fall_asleep(self, now: float) -> list[Decision]:
        """Start no replica any more, because those that run will sleep."""
        self.asleep = True
        return self._decided(now)

    def woken(self, now: float) -> list[Decision]:
        """Note that the replicas have slept and are awake: their canaries have to agree again."""
        self.asleep = False
        for replica in self.replicas.values():
            if replica.state is State.HEALTHY and not replica.dispatches:
                replica.agreed = None
                self._move(replica, State.LOADING, now)
                self._advance(replica, now)
        return self._decided(now)

    # Rows -------------------------------------------------------------------------------------------------------------

    def add(self, rows: Iterable[int], now: float) -> list[Decision]:
        """Add rows to answer. Their numbers have to be new."""
        for number in rows:
            self.rows.add(number)
        return self._decided(now)

    def cancel(self, rows: Iterable[int], now: float) -> list[Decision]:
        """Remove rows that no caller waits for any more."""
        sent: dict[Dispatch, list[int]] = {}
        for number in rows:
            row = self.rows.all.get(number)
            if row is None:
                continue
            if row.dispatch is not None:
                sent.setdefault(row.dispatch, []).append(number)
            self.rows.finish(number)
        for dispatch, numbers in sent.items():
            self._decisions.append(Abandon(dispatch.number, tuple(numbers)))
            self._advance(dispatch.replica, now)
        return self._decided(now)

    @property
    def takers(self) -> dict[str, float]:
        """The replicas that may get fresh rows now, with the work that each has."""
        return {
            name: each.work
            for name, each in self.replicas.items()
            if self._open(each) and each.room and each.isolated is None and name not in self._reserved
        }

    def isolated_retries(self) -> list[tuple[int, str]]:
        """Return which accused rows to send alone now, each with its replica."""
        free = [name for name in self._reserved if self._open(self.replicas[name]) and self.replicas[name].may_isolate]
        return list(zip(self.rows.accused, free, strict=False))

    def send(self, name: str, rows: Mapping[int, float], now: float) -> Dispatch:
        """Send fresh rows to one of `takers` in one call, or one accused row as `isolated_retries` says.

        Args:
            rows: the work of each row.
        """
        replica = self.replicas[name]
        isolated = len(rows) == 1 and rows.keys() <= self.rows.accused.keys()
        if isolated:
            assert self._open(replica) and replica.may_isolate
        else:
            assert name in self.takers and rows and self.rows.fresh.keys() >= rows.keys()
        dispatch = self.rows.depart(replica, rows, now, isolated)
        self._reserve()
        return dispatch

    def producing(self, dispatch: int, now: float) -> list[Decision]:
        """Note that a dispatch has returned its first tokens, so that its replica has survived it."""
        if dispatch in self.rows.dispatches:
            self.rows.settle(self.rows.dispatches[dispatch])
        return self._decided(now)

    def unsent(self, dispatch: int, now: float) -> list[Decision]:
        """Note that a dispatch did not reach its replica, which had ended: its rows are not blamed for that."""
        known = self.rows.dispatches.get(dispatch)
        if known is not None:
            for number in list(known.rows):
                self.rows.wait(number)
            self._die(known.replica, now, "it has ended")
        return self._decided(now)

    def answered(self, dispatch: int, rows: Iterable[int], now: float) -> list[Decision]:
        """Note that a dispatch has returned rows. `Deliver` names those that count."""
        known = self.rows.dispatches.get(dispatch)
        if known is not None:
            known.replica.errors = known.replica.misses = known.replica.restarts = 0
            self._deliver(known, rows, now)
        return self._decided(now)

    def refused(self, dispatch: int, now: float) -> list[Decision]:
        """Note that a replica refused a dispatch with an `InvalidRequestError` or `CapabilityError`."""
        known = self.rows.dispatches.get(dispatch)
        if known is not None:
            self._deliver(known, list(known.rows), now)
        return self._decided(now)

    def failed(self, dispatch: int, now: float, why: str) -> list[Decision]:
        """Note that a call failed with any other error while the replica still runs."""
        known = self.rows.dispatches.get(dispatch)
        if known is not None:
            replica = known.replica
            replica.errors += 1
            for number in list(known.rows):
                self._blame(number, Strike(known.run, why, final=True))
            if replica.errors >= self.limits.errors:
                self._die(replica, now, f"{replica.errors} calls failed in a row; the last one: {why}")
            self._advance(replica, now)
        return self._decided(now)

    # Time -------------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Decision]:
        """Restart replicas whose backoff is over, and end what takes too long. Call this about once a second."""
        limits = self.limits
        for replica in self.replicas.values():
            waited = now - replica.since
            if replica.state is State.DEAD and now >= replica.retry_at and not self.asleep:
                replica.run = ReplicaRun(replica.name, replica.run.number + 1)
                self._move(replica, State.RESTARTING, now)
                self._decisions.append(Start(replica.run))
            elif replica.state in STARTING and waited >= limits.start:
                self._die(replica, now, f"it did not start within {limits.start:g} s")
            elif isinstance(replica.asked, Load) and now - replica.asked_at >= limits.load:
                self._die(replica, now, f"it did not load its weights within {limits.load:g} s")
            elif isinstance(replica.asked, AskCanary) and now - replica.asked_at >= limits.canary:
                self._die(replica, now, f"its canary did not answer within {limits.canary:g} s")
            elif replica.state is State.SUSPECT and waited >= limits.give_up:
                self._die(replica, now, f"it did not answer for {limits.give_up:g} s: {replica.why}")
            elif replica.state is State.SUSPECT and waited >= limits.take_back:
                self._take_rows(replica, replica.why, final=False)
        if self._healthy() or self.updating is not None or not self.rows.all:
            self._dark_since = None
        elif self._dark_since is None:
            self._dark_since = now
        elif now - self._dark_since >= limits.outage:
            self._fail(self.rows.waiting(), f"no replica was healthy for {limits.outage:g} s", usable=None)
        return self._decided(now)

    # Steps that events share ------------------------------------------------------------------------------------------

    @property
    def _target(self) -> int:
        """The weights that replicas have to have."""
        return self.epoch if self.updating is None else self.updating

    def _open(self, replica: Replica) -> bool:
        return self.updating is None and replica.state is State.HEALTHY

    def _healthy(self) -> list[Replica]:
        return [each for each in self.replicas.values() if each.state is State.HEALTHY]

    def _current(self, run: ReplicaRun) -> Replica | None:
        """Return the replica if this is its current run."""
        replica = self.replicas.get(run.replica)
        return replica if replica is not None and replica.run == run else None

    def _done(self, asked: Load | AskCanary) -> Replica | None:
        """Return the replica if it was asked for this, and note that it is done."""
        replica = self._current(asked.run)
        if replica is None or replica.asked != asked:
            return None
        replica.asked, replica.misses = None, 0
        return replica

    def _move(self, replica: Replica, state: State, now: float, why: str = "") -> None:
        """Change the state of a replica."""
        assert state in TRANSITIONS[replica.state], f"{replica.run}: {replica.state} to {state}"
        replica.state, replica.since, replica.asked = state, now, None
        replica.why = why or ("" if state is State.HEALTHY else replica.why)
        if state in (State.LOADING, State.HEALTHY):
            replica.misses = 0
        if state in (State.DEAD, State.GONE):
            replica.weights = replica.agreed = replica.refused = None
        if state not in (*STARTING, State.LOADING):
            # An update does not wait for it any longer: it has the weights, or cannot load them.
            self._pending.pop(replica.name, None)

    def _advance(self, replica: Replica, now: float) -> None:
        """Take the next step towards HEALTHY, or out of the fleet, if nothing is under way."""
        if replica.state is State.DRAINING and not replica.dispatches:
            self._leave(replica, now, "it was told to leave")
        if replica.state is State.HEALTHY and replica.weights != self._target and not replica.dispatches:
            self._move(replica, State.LOADING, now)
        if replica.state is not State.LOADING or replica.asked is not None or replica.refused is not None:
            return
        if replica.weights == replica.agreed == self._target:
            self._move(replica, State.HEALTHY, now)
            return
        replica.asked = (AskCanary if replica.weights == self._target else Load)(replica.run, self._target)
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
        self._decisions.append(Stop(replica.run))
        replica.errors = replica.misses = 0
        replica.restarts += 1
        if replica.restarts > self.limits.restarts:
            self._leave(replica, now, f"it was started too often without answering; the last time: {why}")
        wait = self.limits.backoff * 2.0 ** min(replica.restarts - 1, 60)
        replica.retry_at = now + min(wait, self.limits.longest_backoff)

    def _leave(self, replica: Replica, now: float, why: str) -> None:
        if replica.state is not State.DEAD:
            self._decisions.append(Stop(replica.run))
        self._move(replica, State.GONE, now, why)

    def _take_rows(self, replica: Replica, why: str, final: bool) -> None:
        """Take all unanswered rows from a replica and blame that of its isolated retry, or else all of them."""
        isolated = replica.isolated
        # The rows that were sent last are the likeliest cause, so they are tried first.
        for dispatch in sorted(replica.dispatches.values(), key=lambda each: each.sent, reverse=True):
            rows = tuple(dispatch.rows)
            if not final:
                self._decisions.append(Abandon(dispatch.number, rows))
            for number in rows:
                if isolated is None or dispatch is isolated:
                    self._blame(number, Strike(replica.run, why, final))
                else:
                    self.rows.wait(number)

    def _blame(self, number: int, strike: Strike) -> None:
        error = self.rows.blame(number, strike)
        if error is not None:
            self._decisions.append(Fail(number, error))

    def _deliver(self, dispatch: Dispatch, rows: Iterable[int], now: float) -> None:
        count = tuple(number for number in rows if number in dispatch.rows)
        for number in count:
            self.rows.finish(number)
        if count:
            self._decisions.append(Deliver(count))
        self._advance(dispatch.replica, now)

    def _fail(self, rows: Iterable[int], why: str, usable: bool | None) -> None:
        states = first_few([f"{each.run} is {each.state.value}: {each.why}" for each in self.replicas.values()])
        for number in list(rows):
            self.rows.finish(number)
            error = EngineError(f"{why}. {states}", usable=usable, problems={number: why})
            self._decisions.append(Fail(number, error))

    def _reserve(self) -> None:
        """Keep up to half of the healthy replicas for accused rows while such rows wait."""
        if not self.rows.accused and not self._reserved:
            return
        healthy = self._healthy()
        wanted = max(0, min(len(self.rows.accused), max(1, len(healthy) // 2) - self.rows.isolated))
        free = [each for each in healthy if each.isolated is None]
        # Those that are kept already come first.
        free.sort(key=lambda each: (each.name not in self._reserved, len(each.dispatches)))
        self._reserved = {each.name: None for each in free[:wanted]}

    def _end_update(self, now: float) -> None:
        """End an update that waits for no replica and no row."""
        if self.updating is None or self._pending or self.rows.dispatches:
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
            self._decisions.append(Updated(reasons))
            for replica in refused:
                self._die(replica, now, f"it refused weights that others have loaded: {replica.refused}")
        else:
            self._decisions.append(UpdateFailed(bool(refused), reasons))
        for replica in replicas:
            replica.refused = None
            self._advance(replica, now)

    def _decided(self, now: float) -> list[Decision]:
        self._end_update(now)
        self._reserve()
        if self.rows.all and all(each.state is State.GONE for each in self.replicas.values()):
            self._fail(self.rows.all, "no replica is left", usable=False)
        decisions, self._decisions = self._decisions, []
        return decisions
