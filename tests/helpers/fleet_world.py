"""Engines that obey a `FleetState`, and an oracle that knows what really happened to each row and each weight."""

import math
from dataclasses import dataclass, field

from corelm_fleet.records import (
    Abandon,
    AskCanary,
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
from corelm_fleet.state import FleetState


@dataclass(eq=False)
class Engine:
    """One life of a replica, as it really is."""

    life: Life
    weights: int | None = 0
    agreed: int | None = None
    alive: bool = True
    silent: int = 0


@dataclass(eq=False)
class Call:
    """One flight, as it really is: it goes on after the machine has taken its rows."""

    number: int
    engine: Engine
    weights: int | None
    rows: list[int]
    trial: bool


@dataclass(eq=False)
class Loss:
    """A row was in flight when an engine was lost."""

    engine: Engine
    final: bool
    withdrawn: bool = False


@dataclass(eq=False)
class Truth:
    """What is known of a row."""

    outcomes: list[str] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    @property
    def blamed(self) -> int:
        return sum(not loss.withdrawn for loss in self.losses)


class World:
    """A fleet whose engines do what they are told, whenever a test lets them.

    Args:
        limits: those of the machine.

    Attributes:
        machine: the class to test; a test of the tests sets a broken one.
    """

    machine: type[FleetState] = FleetState

    def __init__(self, limits: FleetLimits | None = None) -> None:
        self.fleet = self.machine(limits)
        self.strict = self.fleet.limits.trial == float("inf")
        self.now = 0.0
        self.engines: dict[Life, Engine] = {}
        self.jobs: list[Start | Load | AskCanary] = []
        self.calls: dict[int, Call] = {}
        self.rows: dict[int, Truth] = {}
        self.epoch = 0
        self.updating = False
        self.ended: list[Updated | UpdateFailed] = []
        self.failures: dict[int, Fail] = {}

    # The machine's decisions ------------------------------------------------------------------------------------------

    def obey(self, decisions, call: Call | None = None, outcome: str = "answered") -> None:
        """Carry decisions out, and check each of them."""
        for each in decisions:
            match each:
                case Start(life):
                    assert life not in self.engines, "a life is started once"
                    assert not any(
                        other.alive and other.life.replica == life.replica for other in self.engines.values()
                    )
                    self.jobs.append(each)
                case Stop(life):
                    if life in self.engines:
                        self.engines[life].alive = False
                case Load(life, _):
                    assert self.engines[life].alive and not self.fleet.replicas[life.replica].flights
                    self.jobs.append(each)
                case AskCanary(life, epoch):
                    assert self.engines[life].weights == epoch
                    self.jobs.append(each)
                case Deliver(rows, epoch):
                    assert call is not None and set(rows) <= set(call.rows)
                    assert call.weights == epoch >= self.epoch, "a row of old weights was delivered"
                    for row in rows:
                        self.settled(row, outcome)
                case Abandon(life, number, rows):
                    assert self.calls[number].engine.life == life and set(rows) <= set(self.calls[number].rows)
                case Fail(row, error):
                    assert error.rows == (row,) and str(row) in str(error)
                    self.failures[row] = each
                    if error.usable:
                        assert self.rows[row].blamed >= self.fleet.limits.deaths, "an innocent row failed"
                    self.settled(row, "failed")
                case Updated(epoch, missed):
                    self.updating, self.epoch = False, epoch
                    assert not self.fleet.rows.flights, "a row of old weights is in flight"
                    for name, replica in self.fleet.replicas.items():
                        if replica.state is not State.GONE and name not in missed:
                            assert self.engines[replica.life].weights == self.engines[replica.life].agreed == epoch
                    self.ended.append(each)
                case UpdateFailed(_, _, weights):
                    self.updating = False
                    for name, known in weights.items():
                        assert known is None or known == self.engines[self.fleet.replicas[name].life].weights
                    self.ended.append(each)

    def settled(self, row: int, outcome: str) -> None:
        assert self.rows[row].outcomes == [], f"row {row} was settled twice"
        self.rows[row].outcomes.append(outcome)

    # Rows -------------------------------------------------------------------------------------------------------------

    def add(self, *rows: int) -> None:
        self.rows.update({row: Truth() for row in rows})
        self.obey(self.fleet.add(rows, self.now))

    def send(self, name: str, *rows: int, trial: bool = False) -> Call:
        """Send rows, and check that the replica may have them."""
        here = [call for call in self.in_flight() if call.engine.life.replica == name]
        flight = self.fleet.send(name, rows, self.now)
        engine = self.engines[flight.life]
        call = Call(flight.number, engine, engine.weights, list(rows), trial)
        self.calls[flight.number] = call
        assert not self.updating, "the gate is closed"
        assert engine.weights == engine.agreed == self.epoch == flight.epoch, "the replica has other weights"
        assert engine.silent < self.fleet.limits.misses, "a suspect gets no rows"
        for row in rows:
            lost = [loss.engine for loss in self.rows[row].losses if not loss.withdrawn]
            assert self.fleet.limits.deaths > len(lost), "the row has to fail"
            assert bool(lost) == trial, "a row that was in flight at a death has to be alone, and no other"
        assert not any(call.trial for call in here) or not self.strict, "a row joined one that is on trial"
        return call

    def send_all(self) -> None:
        """Send every row that can be sent: the accused alone, the others to the first taker."""
        for row, name in self.fleet.trials():
            self.send(name, row, trial=True)
        for name in sorted(self.fleet.takers)[:1]:
            for row in list(self.fleet.rows.fresh):
                if name in self.fleet.takers:
                    self.send(name, row)

    def in_flight(self) -> list[Call]:
        """Return the calls that still have rows without an answer, as the machine sees it."""
        return [self.calls[number] for number in self.fleet.rows.flights]

    def held(self, call: Call) -> list[int]:
        """Return the rows of a call that the machine still expects from it."""
        flight = self.fleet.rows.flights.get(call.number)
        return [] if flight is None else list(flight.rows)

    def answer(self, call: Call, rows: list[int] | None = None) -> None:
        """Return rows; the machine may have taken them from this call already."""
        some = call.rows if rows is None else rows
        before = {row for row in some if row in self.held(call)}
        delivered = self.answered()
        call.engine.silent = 0
        self.obey(self.fleet.answered(call.number, some, self.now), call)
        # Others fail now if the replica was the last one and has left.
        assert self.answered() - delivered == before

    def answered(self) -> set[int]:
        """Return the rows with an answer."""
        return {row for row, truth in self.rows.items() if truth.outcomes == ["answered"]}

    def refuse(self, call: Call, rows: list[int] | None = None) -> None:
        """Refuse a call, or some of its rows: nothing may happen to the replica."""
        replica = self.fleet.replicas[call.engine.life.replica]
        before = replica.state, replica.restarts, replica.errors
        self.obey(self.fleet.refused(call.number, self.now, rows), call, "refused")
        bad = replica.state in (State.DEAD, State.SUSPECT)
        assert (replica.state if bad else before[0], replica.restarts, replica.errors) == before, "it counted"

    def fail(self, call: Call) -> None:
        """Fail a call while the engine still runs."""
        name = call.engine.life.replica
        last = self.fleet.replicas[name].errors + 1 >= self.fleet.limits.errors
        if self.held(call):
            self.lose(call.engine, [call], final=True)
            if last and self.fleet.replicas[name].life == call.engine.life:
                self.lose(call.engine, [each for each in self.in_flight() if each is not call], True)
        self.obey(self.fleet.failed(call.number, self.now, "out of memory"))

    def cancel(self, *rows: int) -> None:
        for row in rows:
            if not self.rows[row].outcomes:
                self.settled(row, "cancelled")
        self.obey(self.fleet.cancel(rows, self.now))

    # Engines ----------------------------------------------------------------------------------------------------------

    def state(self, engine: Engine) -> State:
        return self.fleet.replicas[engine.life.replica].state

    def join(self, name: str, **options) -> None:
        self.obey(self.fleet.join(name, self.now, **options))

    def finish(self, job: Start | Load | AskCanary) -> None:
        """Do a job well; an engine that was stopped meanwhile still reports it."""
        self.jobs.remove(job)
        match job:
            case Start(life):
                self.engines[life] = Engine(life)
                current = self.fleet.replicas[life.replica]
                self.engines[life].alive = current.life == life and current.state in (State.JOINING, State.RESTARTING)
                self.obey(self.fleet.opened(life, self.now))
            case Load(life, epoch):
                self.engines[life].silent = 0
                self.engines[life].weights, self.engines[life].agreed = epoch, None
                self.obey(self.fleet.loaded(life, epoch, self.now))
            case AskCanary(life, epoch):
                self.engines[life].silent = 0
                if self.engines[life].weights == epoch:
                    self.engines[life].agreed = epoch
                self.obey(self.fleet.canary(life, epoch, True, self.now))

    def botch(self, job: Start | Load | AskCanary, refuse: bool = False) -> None:
        """Fail a job."""
        self.jobs.remove(job)
        if isinstance(job, Load) and refuse:
            if job.life in self.engines:
                self.engines[job.life].silent = 0
            self.obey(self.fleet.load_refused(job.life, job.epoch, self.now, "no such parameter"))
        elif isinstance(job, AskCanary):
            self.obey(self.fleet.canary(job.life, job.epoch, False, self.now, "log-probs differ by 3"))
        else:
            if job.life in self.engines:
                self.engines[job.life].weights = None
            self.obey(self.fleet.died(job.life, self.now, "no room for the weights"))

    def finish_all(self) -> None:
        for _ in range(100):
            if self.jobs:
                self.finish(self.jobs[0])
        assert not self.jobs, "the jobs do not end"

    def open(self, *names: str, **options) -> None:
        """Add replicas and take them to HEALTHY."""
        for name in names:
            self.join(name, **options)
        self.finish_all()

    def engine(self, name: str) -> Engine:
        return self.engines[self.fleet.replicas[name].life]

    def lose(self, engine: Engine, calls: list[Call], final: bool) -> None:
        """Note the rows that are lost with an engine: those on trial or, without a trial, all of them."""
        calls = [call for call in calls if call.engine is engine and self.held(call)]
        flights = self.fleet.rows.flights
        trial = [call for call in calls if call.trial and not flights[call.number].settled]
        if self.strict and trial:
            assert len(calls) == 1, "a row on trial has company"
        for call in trial or calls:
            for row in self.held(call):
                self.rows[row].losses.append(Loss(engine, final))

    def die(self, engine: Engine) -> None:
        engine.alive = False
        self.lose(engine, self.in_flight(), final=True)
        self.obey(self.fleet.died(engine.life, self.now, "exit code -9"))

    def miss(self, engine: Engine) -> None:
        # An engine that loads weights may be too busy to reply.
        engine.silent += self.state(engine) is not State.STALE
        if self.state(engine) is State.DRAINING and self.fleet.replicas[engine.life.replica].misses + 1 >= (
            self.fleet.limits.misses
        ):
            self.lose(engine, self.in_flight(), final=True)
        self.obey(self.fleet.missed(engine.life, self.now, "no reply to a health check"))

    def hear(self, engine: Engine) -> None:
        engine.silent = 0
        if self.state(engine) is State.SUSPECT:
            for truth in self.rows.values():
                for loss in truth.losses:
                    loss.withdrawn |= loss.engine is engine and not loss.final
        self.obey(self.fleet.heard(engine.life, self.now))

    def drain(self, name: str) -> None:
        replica = self.fleet.replicas[name]
        if replica.state is State.SUSPECT:
            self.lose(self.engine(name), self.in_flight(), final=True)
        self.obey(self.fleet.drain(name, self.now))

    def update(self) -> None:
        for name, replica in self.fleet.replicas.items():
            if replica.state is State.SUSPECT:
                self.lose(self.engine(name), self.in_flight(), final=False)
        self.updating = True
        self.obey(self.fleet.update(self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        limits = self.fleet.limits
        for name, replica in self.fleet.replicas.items():
            if replica.state is State.SUSPECT and self.now - replica.since >= min(limits.take_back, limits.give_up):
                self.lose(self.engine(name), self.in_flight(), final=False)
        self.obey(self.fleet.tick(self.now))

    def check(self) -> None:
        """Check that no row is lost: each one without an outcome waits or is in flight, and is so once."""
        rows = self.fleet.rows
        open_rows = [row for row, truth in self.rows.items() if not truth.outcomes]
        places = [*rows.fresh, *rows.accused, *(row for flight in rows.flights.values() for row in flight.rows)]
        assert sorted(places) == sorted(open_rows) == sorted(rows.all)
        for row in open_rows:
            assert self.rows[row].blamed < self.fleet.limits.deaths, "the row has to fail"

    def calm_down(self) -> None:
        """Let everything end well: every row has to be settled within a bounded time."""
        for _ in range(60 + len(self.rows)):
            self.finish_all()
            for engine in list(self.engines.values()):
                if engine.alive:
                    self.hear(engine)
            self.send_all()
            for call in self.in_flight():
                self.answer(call)
            self.check()
            if not self.fleet.rows.all and not self.jobs and not self.updating:
                break
            self.pass_time(30.0)
        assert not self.updating, "the update does not end"
        assert all(truth.outcomes for truth in self.rows.values()), "rows are left"


def world(*names: str, **limits: float) -> World:
    """Return a fleet of healthy replicas."""
    made = World(limits=FleetLimits(**{"trial": math.inf, **limits}))
    made.open(*names)
    return made


def state(of: World, name: str) -> State:
    return of.fleet.replicas[name].state
