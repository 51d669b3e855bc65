"""Which rows wait, which are in flight on which replica, and which are blamed for the loss of a replica."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from corelm.errors import EngineError
from corelm.validate import invalid
from corelm_fleet.records import AskCanary, Life, Load, State


class Strike(NamedTuple):
    """A replica was lost, or failed a call, while it had a row.

    Attributes:
        life: the replica.
        why: what happened to it.
        final: False while the replica is only a suspect. The strike is withdrawn if the replica is heard from again.
    """

    life: Life
    why: str
    final: bool


@dataclass(slots=True, eq=False)
class Row:
    """A row that has no answer yet: the flight that has it, unless it waits, and the losses while it was in flight."""

    flight: Flight | None = None
    strikes: list[Strike] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Flight:
    """Rows that one call took to a replica.

    Attributes:
        number: its number; none is used twice.
        replica: where it went.
        life: the life of the replica at that time.
        epoch: the weights that its rows are sampled from.
        sent: when it was sent.
        rows: its rows that have no answer yet.
        on_trial: whether it holds one row that was in flight when another replica was lost.
        settled: whether the replica has survived it: it was heard from long enough afterwards.
    """

    number: int
    replica: Replica
    life: Life
    epoch: int
    sent: float
    rows: dict[int, None]
    on_trial: bool
    settled: bool = False


@dataclass(slots=True, eq=False)
class Replica:
    """A replica, as the state machine knows it.

    Attributes:
        life: its current start.
        state: its state.
        since: when it got into this state.
        most_flights: how many flights it takes at once; None sets no limit.
        weights: the epoch of its weights; None if that is not known.
        agreed: the epoch for which its canary has agreed; None if it has not.
        flights: the flights that it has.
        trial: the flight whose row is on trial here; None once the replica has survived it.
        asked: what it was asked to do on its way to HEALTHY and has not done yet.
        asked_at: when it was asked.
        refused: why it refused the weights of the update under way.
        misses: health checks missed in a row.
        errors: calls failed in a row.
        restarts: restarts since it last answered a row, or was healthy for long.
        retry_at: when it may be started again.
        why: why it last became SUSPECT, DEAD or GONE; for people.
    """

    life: Life
    state: State
    since: float
    most_flights: int | None = None
    weights: int | None = None
    agreed: int | None = None
    flights: dict[int, Flight] = field(default_factory=dict)
    trial: Flight | None = None
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
        return self.life.replica

    @property
    def room(self) -> bool:
        """Whether it takes another flight."""
        return self.most_flights is None or len(self.flights) < self.most_flights

    @property
    def may_try(self) -> bool:
        """Whether it can take a row on trial: if it then dies, nothing else that it has is likely to be the cause."""
        return self.trial is None and self.room and all(flight.settled for flight in self.flights.values())


class Rows:
    """Every row that has no answer yet, and where it is.

    Attributes:
        deaths: how many strikes make a row fail.
        all: the rows by number.
        flights: the flights that have rows, by number.
        fresh: the rows that wait and may share a flight, in order.
        accused: the rows that wait to be tried alone, the likeliest cause of a loss first.
        trying: how many replicas have a row on trial.
    """

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths
        self.all: dict[int, Row] = {}
        self.flights: dict[int, Flight] = {}
        self.fresh: dict[int, None] = {}
        self.accused: dict[int, None] = {}
        self.trying = 0
        self._numbers = itertools.count()

    def add(self, number: int) -> None:
        """Add a row that has to be answered."""
        if number in self.all:
            raise invalid("rows", f"row {number} is already there")
        self.all[number] = Row()
        self.fresh[number] = None

    def depart(self, replica: Replica, rows: Sequence[int], epoch: int, now: float, on_trial: bool) -> Flight:
        """Move waiting rows into a new flight on a replica."""
        number = next(self._numbers)
        flight = Flight(number, replica, replica.life, epoch, now, dict.fromkeys(rows), on_trial)
        self.flights[number] = replica.flights[number] = flight
        if on_trial:
            replica.trial = flight
            self.trying += 1
        for row in rows:
            (self.accused if on_trial else self.fresh).pop(row)
            self.all[row].flight = flight
        return flight

    def settle(self, flight: Flight) -> None:
        """Note that a replica has survived a flight."""
        flight.settled = True
        self._end_trial(flight)

    def finish(self, number: int) -> None:
        """Remove a row that is answered, failed or cancelled."""
        self._land(number)
        del self.all[number]
        self.fresh.pop(number, None)
        self.accused.pop(number, None)

    def wait(self, number: int) -> None:
        """Take a row out of its flight, to be sent again."""
        self._land(number)
        (self.accused if self.all[number].strikes else self.fresh)[number] = None

    def blame(self, number: int, strike: Strike) -> EngineError | None:
        """Give a row in flight a strike: it waits to be tried alone. With too many it fails; return the error then."""
        strikes = self.all[number].strikes
        strikes.append(strike)
        if len(strikes) < self.deaths:
            self.wait(number)
            return None
        self.finish(number)
        said = "; ".join(f"{each.life}: {each.why}" for each in strikes)
        why = f"it was in flight when {len(strikes)} replicas were lost, so it is not sent to another one. {said}"
        return EngineError(f"row {number}: {why}", usable=True, problems={number: why})

    def withdraw(self, life: Life) -> None:
        """Withdraw the strikes for the loss of a replica that was heard from again."""
        for number, row in self.all.items():
            row.strikes = [strike for strike in row.strikes if strike.final or strike.life != life]
            if not row.strikes and number in self.accused:
                del self.accused[number]
                self.fresh[number] = None

    def waiting(self) -> Iterable[int]:
        """Return the rows that are not in flight."""
        return [*self.accused, *self.fresh]

    def _land(self, number: int) -> None:
        """Take a row out of its flight, if it is in one."""
        row = self.all[number]
        flight, row.flight = row.flight, None
        if flight is None:
            return
        del flight.rows[number]
        if not flight.rows:
            del self.flights[flight.number], flight.replica.flights[flight.number]
            self._end_trial(flight)

    def _end_trial(self, flight: Flight) -> None:
        if flight.replica.trial is flight:
            flight.replica.trial = None
            self.trying -= 1
