"""What happens to rows, replicas and weights when engines start, stall, die, restart and load weights.

The machine has no threads, no clock and no engine. Each event is a method; it takes the time and returns the decisions
that its owner has to carry out, in their order. The owner holds one lock around every method. These rules always hold:

1.  A row is answered exactly once, or fails with an `EngineError` that names it. When a replica dies, only the rows
    that it had not answered are sent again, elsewhere. What a replica returns later for a row that was taken from it is
    discarded.
2.  A request that a replica refuses does not count against the replica. A row that was in flight at a death is *on
    trial*: it is sent alone, and to a replica that has survived the rows it has. If that replica dies, only the row on
    trial is blamed; if no row is on trial, every unanswered row is. A row that is blamed for `deaths` deaths fails.
3.  A replica gets rows only while its weights are the current ones. `update` closes the gate; each replica finishes its
    rows, loads and is asked for its canary; then the gate opens for all together. No row of an older epoch is in flight
    when `Updated` is decided.
4.  A replica gets rows only after its canary has agreed.
5.  Every wait has a limit. If no replica is left, all rows fail at once.

The states, their transitions, the limits and the decisions are in `records.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from corelm.errors import EngineError
from corelm.validate import invalid
from corelm_fleet.records import (
    STARTING,
    Abandon,
    AskCanary,
    Decision,
    Life,
    Load,
    Start,
    State,
)
from corelm_fleet.rows import Flight, Replica, Strike
from corelm_fleet.steps import FleetSteps


class FleetState(FleetSteps):
    """The state of a fleet.

    Attributes:
        limits: how patient the fleet is.
        replicas: every replica by name, those that are gone included.
        rows: the rows that have no answer yet, and the flights that they are in.
        epoch: the weights in force.
        updating: the epoch that an update is loading; None while the gate is open.
        asleep: whether the replicas sleep, so that none may be started: others use the memory that it would take.
    """

    # Replicas ---------------------------------------------------------------------------------------------------------

    def join(self, name: str, now: float, most_flights: int | None = None) -> list[Decision]:
        """Add a replica, which has to be started.

        Args:
            name: its name. A name can be used again when its replica is gone.
            now: the time.
            most_flights: how many calls it takes at once; None sets no limit.
        """
        before = self.replicas.get(name)
        if before is not None and before.state is not State.GONE:
            raise invalid("replica", f"there is already a replica {name!r}; choose another name")
        life = Life(name, 1)
        if before is not None:
            self._states[State.GONE] -= 1
            life = Life(name, before.life.number + 1)
        self.replicas[name] = Replica(life, State.JOINING, now, most_flights)
        self._states[State.JOINING] += 1
        self._decisions.append(Start(life))
        return self._decided(now)

    def drain(self, name: str, now: float) -> list[Decision]:
        """Let a replica finish its rows and leave. One that does not answer loses its rows and leaves at once."""
        replica = self._replica(name)
        if replica.state is State.HEALTHY:
            self._move(replica, State.DRAINING, now)
            self._advance(replica, now)
        elif replica.state not in (State.GONE, State.DRAINING):
            self._take_rows(replica, "it was told to leave while it did not answer", final=True)
            self._leave(replica, now, "it was told to leave")
        return self._decided(now)

    def opened(self, life: Life, now: float) -> list[Decision]:
        """Note that a replica has started; it has the weights of epoch 0."""
        replica = self._current(life)
        if replica is not None and replica.state in STARTING:
            replica.weights = 0
            self._move(replica, State.STALE, now)
            self._advance(replica, now)
        return self._decided(now)

    def died(self, life: Life, now: float, why: str) -> list[Decision]:
        """Note that a replica has ended, did not start, or failed to load weights, and say why."""
        replica = self._current(life)
        if replica is not None:
            self._die(replica, now, why)
        return self._decided(now)

    def heard(self, life: Life, now: float) -> list[Decision]:
        """Note that a replica has passed a health check."""
        replica = self._current(life)
        if replica is not None:
            replica.misses = 0
            for flight in replica.flights.values():
                if flight.sent + self.limits.trial <= now:
                    self.rows.settle(flight)
            if replica.state is State.SUSPECT:
                self.rows.withdraw(life)
                stale = replica.weights != self._target and not replica.flights
                self._move(replica, State.STALE if stale else State.HEALTHY, now)
                self._advance(replica, now)
        return self._decided(now)

    def missed(self, life: Life, now: float, why: str) -> list[Decision]:
        """Note that a replica has missed a health check, or that a call to it takes suspiciously long."""
        replica = self._current(life)
        if replica is not None:
            replica.misses += 1
            if replica.misses >= self.limits.misses:
                # A replica that loads weights may be too busy to reply, though not for ever.
                busy = replica.state is State.STALE and now - replica.asked_at < self.limits.give_up
                if replica.state is State.HEALTHY:
                    self._move(replica, State.SUSPECT, now, why)
                elif replica.state is State.DRAINING or (replica.state is State.STALE and not busy):
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
        self.rows.changed = True
        replicas = list(self.replicas.values())
        # An update waits for replicas that are being started only if no other can load now.
        run = [each.name for each in replicas if each.state in (State.STALE, State.HEALTHY)]
        self._pending = dict.fromkeys(run or [each.name for each in replicas if each.state is not State.GONE])
        for replica in replicas:
            if replica.state is State.SUSPECT:
                # Otherwise it could return answers of the old weights after the update.
                self._take_rows(replica, "it did not answer when an update began", final=False)
            self._advance(replica, now)
        return self._decided(now)

    def loaded(self, life: Life, epoch: int, now: float) -> list[Decision]:
        """Note that a replica has loaded the weights of an epoch."""
        replica = self._done(Load(life, epoch))
        if replica is not None:
            # The canary has to agree again, also with weights that it agreed with before.
            replica.weights, replica.agreed = epoch, None
            self._advance(replica, now)
        return self._decided(now)

    def load_refused(self, life: Life, epoch: int, now: float, why: str) -> list[Decision]:
        """Note that a replica refused weights with an `InvalidRequestError` or `CapabilityError` and kept its own."""
        replica = self._done(Load(life, epoch))
        if replica is not None:
            if epoch == self.updating:
                # Whether it or the weights are at fault is known when the others have tried.
                replica.refused = why
                self._pending.pop(replica.name, None)
            elif epoch == self._target:
                self._die(replica, now, f"it refused the current weights: {why}")
            self._advance(replica, now)
        return self._decided(now)

    def canary(self, life: Life, epoch: int, agreed: bool, now: float, why: str = "") -> list[Decision]:
        """Note what the canary of an epoch said on a replica."""
        replica = self._done(AskCanary(life, epoch))
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
            if replica.state is State.HEALTHY and not replica.flights:
                replica.agreed = None
                self._move(replica, State.STALE, now)
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
        flying: dict[Flight, list[int]] = {}
        for number in rows:
            row = self.rows.all.get(number)
            if row is None:
                continue
            if row.flight is not None:
                flying.setdefault(row.flight, []).append(number)
            self.rows.finish(number)
        for flight, numbers in flying.items():
            self._decisions.append(Abandon(flight.life, flight.number, tuple(numbers)))
            self._advance(flight.replica, now)
        return self._decided(now)

    @property
    def takers(self) -> frozenset[str]:
        """The replicas that may get fresh rows now: the same object until they change."""
        if self.rows.changed:
            self.rows.changed = False
            takers = frozenset(
                name
                for name, each in self.replicas.items()
                if self._open(each) and each.room and each.trial is None and name not in self._reserved
            )
            if takers != self._takers:
                self._takers = takers
        return self._takers

    def trials(self) -> list[tuple[int, str]]:
        """Return which accused rows to send alone now, each with its replica."""
        free = [name for name in self._reserved if self._open(self.replicas[name]) and self.replicas[name].may_try]
        return list(zip(self.rows.accused, free, strict=False))

    def send(self, name: str, rows: Sequence[int], now: float) -> Flight:
        """Send fresh rows to one of `takers` in one call, or one accused row as `trials` says."""
        replica = self._replica(name)
        on_trial = len(rows) == 1 and rows[0] in self.rows.accused
        if not (self._open(replica) and replica.may_try if on_trial else rows and name in self.takers):
            raise invalid("replica", f"{name} is {replica.state.value} and cannot take rows {list(rows)} now")
        if not on_trial and not self.rows.fresh.keys() >= set(rows):
            raise invalid("rows", f"{list(rows)} do not all wait for a shared call")
        flight = self.rows.depart(replica, rows, self.epoch, now, on_trial)
        self._reserve()
        return flight

    def producing(self, flight: int, now: float) -> list[Decision]:
        """Note that a flight has returned its first tokens, so that its replica has survived it."""
        if flight in self.rows.flights:
            self.rows.settle(self.rows.flights[flight])
        return self._decided(now)

    def unsent(self, flight: int, now: float) -> list[Decision]:
        """Note that a flight did not reach its replica, which had ended: its rows are not blamed for that."""
        known = self.rows.flights.get(flight)
        if known is not None:
            for number in list(known.rows):
                self.rows.wait(number)
            self._die(known.replica, now, "it has ended")
        return self._decided(now)

    def answered(self, flight: int, rows: Iterable[int], now: float) -> list[Decision]:
        """Note that a flight has returned rows. `Deliver` names those that count."""
        known = self.rows.flights.get(flight)
        if known is not None:
            known.replica.errors = known.replica.misses = known.replica.restarts = 0
            self._deliver(known, rows, now)
        return self._decided(now)

    def refused(self, flight: int, now: float, rows: Iterable[int] | None = None) -> list[Decision]:
        """Note that a replica refused a flight with an `InvalidRequestError` or `CapabilityError`.

        Args:
            flight: the flight.
            now: the time.
            rows: the rows at fault: `Deliver` names them, and the others are sent again. None for all.
        """
        known = self.rows.flights.get(flight)
        if known is not None:
            at_fault = set(known.rows if rows is None else rows)
            for number in [number for number in known.rows if number not in at_fault]:
                self.rows.wait(number)
            self._deliver(known, at_fault, now)
        return self._decided(now)

    def failed(self, flight: int, now: float, why: str) -> list[Decision]:
        """Note that a call failed with any other error while the replica still runs."""
        known = self.rows.flights.get(flight)
        if known is not None:
            replica = known.replica
            replica.errors += 1
            for number in list(known.rows):
                self._blame(number, Strike(known.life, why, final=True))
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
                replica.life = Life(replica.name, replica.life.number + 1)
                self._move(replica, State.RESTARTING, now)
                self._decisions.append(Start(replica.life))
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
        if self._states[State.HEALTHY] or self.updating is not None or not self.rows.all:
            self._dark_since = None
        elif self._dark_since is None:
            self._dark_since = now
        elif now - self._dark_since >= limits.outage:
            self._fail(self.rows.waiting(), f"no replica was healthy for {limits.outage:g} s", usable=None)
        return self._decided(now)
