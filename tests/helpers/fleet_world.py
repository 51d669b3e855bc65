"""Engines that obey a `FleetState`, and an oracle that knows what really happened to each row and each weight."""

import math
from dataclasses import dataclass, field

from corelm_fleet.records import (
    Abandon,
    AskCanary,
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
from corelm_fleet.state import FleetState


@dataclass(eq=False)
class Engine:
    """One run of a replica, as it really is."""

    run: ReplicaRun
    weights: int | None = 0
    agreed: int | None = None
    alive: bool = True
    silent: int = 0


@dataclass(eq=False)
class Call:
    """One dispatch, as it really is: it goes on after the machine has taken its rows."""

    number: int
    engine: Engine
    weights: int | None
    rows: list[int]
    isolated: bool


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
        most_dispatches: how many each replica takes at once.

    Attributes:
        machine: the class to test; a test of the tests sets a broken one.
    """

    machine: type[FleetState] = FleetState

    def __init__(self, limits: FleetLimits | None = None, most_dispatches: int | None = None) -> None:
        self.fleet = self.machine(limits)
        self.strict = self.fleet.limits.trial == float("inf")
        self.most = most_dispatches
        self.now = 0.0
        self.engines: dict[ReplicaRun, Engine] = {}
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
                case Start(run):
                    assert run not in self.engines, "a run is started once"
                    assert not any(other.alive and other.run.replica == run.replica for other in self.engines.values())
                    self.jobs.append(each)
                case Stop(run):
                    if run in self.engines:
                        self.engines[run].alive = False
                case Load(run, _):
                    assert self.engines[run].alive and not self.fleet.replicas[run.replica].dispatches
                    self.jobs.append(each)
                case AskCanary(run, epoch):
                    assert self.engines[run].weights == epoch
                    self.jobs.append(each)
                case Deliver(rows):
                    assert call is not None and set(rows) <= set(call.rows)
                    assert call.weights == self.epoch, "a row of old weights was delivered"
                    for row in rows:
                        self.settled(row, outcome)
                case Abandon(number, rows):
                    assert set(rows) <= set(self.calls[number].rows)
                case Fail(row, error):
                    assert error.rows == (row,)
                    self.failures[row] = each
                    if error.usable:
                        assert self.rows[row].blamed >= self.fleet.limits.deaths, "an innocent row failed"
                    self.settled(row, "failed")
                case Updated(missed):
                    self.updating, self.epoch = False, self.fleet.epoch
                    assert not self.fleet.rows.dispatches, "a row of old weights is in flight"
                    for name, replica in self.fleet.replicas.items():
                        if replica.state is not State.GONE and name not in missed:
                            assert self.engines[replica.run].weights == self.engines[replica.run].agreed == self.epoch
                    self.ended.append(each)
                case UpdateFailed():
                    self.updating = False
                    for replica in self.fleet.replicas.values():
                        assert replica.weights is None or replica.weights == self.engines[replica.run].weights
                    self.ended.append(each)

    def settled(self, row: int, outcome: str) -> None:
        assert self.rows[row].outcomes == [], f"row {row} was settled twice"
        self.rows[row].outcomes.append(outcome)

    # Rows -------------------------------------------------------------------------------------------------------------

    def add(self, *rows: int) -> None:
        self.rows.update({row: Truth() for row in rows})
        self.obey(self.fleet.add(rows, self.now))

    def send(self, name: str, *rows: int, isolated: bool = False) -> Call:
        """Send rows, and check that the replica may have them."""
        here = [call for call in self.in_flight() if call.engine.run.replica == name]
        dispatch = self.fleet.send(name, dict.fromkeys(rows, 1.0), self.now)
        engine = self.engines[dispatch.run]
        call = Call(dispatch.number, engine, engine.weights, list(rows), isolated)
        self.calls[dispatch.number] = call
        assert not self.updating, "the gate is closed"
        assert engine.weights == engine.agreed == self.epoch == self.fleet.epoch, "the replica has other weights"
        assert engine.silent < self.fleet.limits.misses, "a suspect gets no rows"
        for row in rows:
            lost = [loss.engine for loss in self.rows[row].losses if not loss.withdrawn]
            assert self.fleet.limits.deaths > len(lost), "the row has to fail"
            assert bool(lost) == isolated, "a row that was in flight at a death has to be alone, and no other"
        assert not any(call.isolated for call in here) or not self.strict, "a row joined one that is retried alone"
        return call

    def send_all(self) -> None:
        """Send every row that can be sent: the accused alone, the others to the first taker."""
        for row, name in self.fleet.isolated_retries():
            self.send(name, row, isolated=True)
        for name in sorted(self.fleet.takers)[:1]:
            for row in list(self.fleet.rows.fresh):
                if name in self.fleet.takers:
                    self.send(name, row)

    def in_flight(self) -> list[Call]:
        """Return the calls that still have rows without an answer, as the machine sees it."""
        return [self.calls[number] for number in self.fleet.rows.dispatches]

    def held(self, call: Call) -> list[int]:
        """Return the rows of a call that the machine still expects from it."""
        dispatch = self.fleet.rows.dispatches.get(call.number)
        return [] if dispatch is None else list(dispatch.rows)

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

    def refuse(self, call: Call) -> None:
        """Refuse a call: nothing may happen to the replica."""
        replica = self.fleet.replicas[call.engine.run.replica]
        before = replica.state, replica.restarts, replica.errors
        self.obey(self.fleet.refused(call.number, self.now), call, "refused")
        bad = replica.state in (State.DEAD, State.SUSPECT)
        assert (replica.state if bad else before[0], replica.restarts, replica.errors) == before, "it counted"

    def fail(self, call: Call) -> None:
        """Fail a call while the engine still runs."""
        name = call.engine.run.replica
        last = self.fleet.replicas[name].errors + 1 >= self.fleet.limits.errors
        if self.held(call):
            self.lose(call.engine, [call], final=True)
            if last and self.fleet.replicas[name].run == call.engine.run:
                self.lose(call.engine, [each for each in self.in_flight() if each is not call], True)
        self.obey(self.fleet.failed(call.number, self.now, "out of memory"))

    def cancel(self, *rows: int) -> None:
        for row in rows:
            if not self.rows[row].outcomes:
                self.settled(row, "cancelled")
        self.obey(self.fleet.cancel(rows, self.now))

    # Engines ----------------------------------------------------------------------------------------------------------

    def state(self, engine: Engine) -> State:
        return self.fleet.replicas[engine.run.replica].state

    def join(self, name: str) -> None:
        self.obey(self.fleet.join(name, self.now))

    def finish(self, job: Start | Load | AskCanary) -> None:
        """Do a job well; an engine that was stopped meanwhile still reports it."""
        self.jobs.remove(job)
        match job:
            case Start(run):
                self.engines[run] = Engine(run)
                current = self.fleet.replicas[run.replica]
                self.engines[run].alive = current.run == run and current.state in (State.JOINING, State.RESTARTING)
                self.obey(self.fleet.opened(run, self.now, self.most))
            case Load(run, epoch):
                self.engines[run].silent = 0
                self.engines[run].weights, self.engines[run].agreed = epoch, None
                self.obey(self.fleet.loaded(run, epoch, self.now))
            case AskCanary(run, epoch):
                self.engines[run].silent = 0
                if self.engines[run].weights == epoch:
                    self.engines[run].agreed = epoch
                self.obey(self.fleet.canary(run, epoch, True, self.now))

    def botch(self, job: Start | Load | AskCanary, refuse: bool = False) -> None:
        """Fail a job."""
        self.jobs.remove(job)
        if isinstance(job, Load) and refuse:
            if job.run in self.engines:
                self.engines[job.run].silent = 0
            self.obey(self.fleet.load_refused(job.run, job.epoch, self.now, "no such parameter"))
        elif isinstance(job, AskCanary):
            self.obey(self.fleet.canary(job.run, job.epoch, False, self.now, "log-probs differ by 3"))
        else:
            if job.run in self.engines:
                self.engines[job.run].weights = None
            self.obey(self.fleet.died(job.run, self.now, "no room for the weights"))

    def finish_all(self) -> None:
        for _ in range(100):
            if self.jobs:
                self.finish(self.jobs[0])
        assert not self.jobs, "the jobs do not end"

    def open(self, *names: str) -> None:
        """Add replicas and take them to HEALTHY."""
        for name in names:
            self.join(name)
        self.finish_all()

    def engine(self, name: str) -> Engine:
        return self.engines[self.fleet.replicas[name].run]

    def lose(self, engine: Engine, calls: list[Call], final: bool) -> None:
        """Note the rows that are lost with an engine: that of an isolated retry, or else all of them."""
        calls = [call for call in calls if call.engine is engine and self.held(call)]
        dispatches = self.fleet.rows.dispatches
        alone = [call for call in calls if call.isolated and not dispatches[call.number].settled]
        if self.strict and alone:
            assert len(calls) == 1, "a row that is retried alone has company"
        for call in alone or calls:
            for row in self.held(call):
                self.rows[row].losses.append(Loss(engine, final))

    def die(self, engine: Engine) -> None:
        engine.alive = False
        self.lose(engine, self.in_flight(), final=True)
        self.obey(self.fleet.died(engine.run, self.now, "exit code -9"))

    def miss(self, engine: Engine) -> None:
        # An engine that loads weights may be too busy to reply.
        engine.silent += self.state(engine) is not State.LOADING
        if self.state(engine) is State.DRAINING and self.fleet.replicas[engine.run.replica].misses + 1 >= (
            self.fleet.limits.misses
        ):
            self.lose(engine, self.in_flight(), final=True)
        self.obey(self.fleet.missed(engine.run, self.now, "no reply to a health check"))

    def hear(self, engine: Engine) -> None:
        engine.silent = 0
        if self.state(engine) is State.SUSPECT:
            for truth in self.rows.values():
                for loss in truth.losses:
                    loss.withdrawn |= loss.engine is engine and not loss.final
        self.obey(self.fleet.heard(engine.run, self.now))

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
        found = [*rows.fresh, *rows.accused, *(row for dispatch in rows.dispatches.values() for row in dispatch.rows)]
        assert sorted(found) == sorted(open_rows) == sorted(rows.all)
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
