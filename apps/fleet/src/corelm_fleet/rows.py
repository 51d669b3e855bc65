"""Which rows wait, which are in flight on which replica, and which are blamed for the loss of a replica."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from corelm.errors import EngineError
from corelm_fleet.records import AskCanary, Load, ReplicaRun, State


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
