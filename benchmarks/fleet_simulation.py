"""A discrete-event simulation of a fleet: real state machine and routing, simulated engines, requests and failures.

An engine has `SLOTS` slots; rows beyond them wait in order. The rows in the slots share its speed: each gets
`ROW_SPEED` tokens a second, or an equal part of `SPEED` if that is less. Reading a prompt counts as `PROMPT_TOKEN`
sampled tokens for each token that is not in the engine's prefix cache, which holds the last `CACHED` tokens of prompts
and answers.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from corelm_fleet.records import AskCanary, Decision, Deliver, Fail, FleetLimits, Start, State
from corelm_fleet.routing import PROMPT_TOKEN, Group, Loads, Policy, assign
from corelm_fleet.state import Dispatch, FleetState

SLOTS, SPEED, ROW_SPEED, CACHED = 16, 400.0, 50.0, 60_000
#: The longest answer; samples of a group; the mean number of turns of a session.
MOST_NEW, SAMPLES, TURNS = 4096, 8, 6
#: Prompts that many single rows share; the first ones are the most frequent.
PROMPTS = 2000
FREQUENCIES = list(itertools.accumulate(1 / (number + 1) for number in range(PROMPTS)))
#: The length that routing expects of an answer: about the mean, which a fleet can learn.
EXPECTED = 300.0
#: Seconds: a restart; between two health checks; between two looks at the imbalance.
RESTART, HEALTH, LOOK = 20.0, 5.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The requests that a fleet gets.

    Attributes:
        replicas: how many replicas there are.
        seconds: how long requests arrive. A third of the work are groups of `SAMPLES` samples, a third turns of
            sessions, a third single rows with prompts of Zipf-like frequency.
        shared: whether single rows share prompts, so that some keys are much more frequent than others.
        busy: the part of the fleet's speed that is asked for.
        batch: groups that arrive at once, at the beginning.
        deaths: the part of the replicas that die.
        slow: the part of the replicas that run at 0.4 of the others' speed.
        seed: of everything random.
    """

    replicas: int
    seconds: float
    shared: bool = True
    busy: float = 0.9
    batch: int = 0
    deaths: float = 0.03
    slow: float = 0.03
    seed: int = 0


@dataclass
class Outcome:
    """What was measured.

    Attributes:
        latencies: seconds from the arrival of each row to its answer.
        imbalance: the largest outstanding work of a replica over the mean, once a second.
        busiest: the outstanding work of each replica, half-way.
        sampled: tokens of the answers.
        lost: tokens that were computed by replicas that died.
        prompt_tokens, hits: tokens of prompts, and those found in a prefix cache.
        decisions: how many groups were placed, and the seconds that took.
        events: events of the state machine, and the seconds that they took.
        makespan: when the last row was answered.
        failed: rows that failed.
    """

    latencies: list[float] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    sampled: float = 0.0
    lost: float = 0.0
    prompt_tokens: int = 0
    hits: int = 0
    decisions: int = 0
    deciding: float = 0.0
    events: int = 0
    in_events: float = 0.0
    makespan: float = 0.0
    failed: int = 0


@dataclass(eq=False, slots=True)
class Row:
    """A row: when it arrived, its prompt, the true length of its answer."""

    number: int
    arrived: float
    prompt: int
    length: float
    key: Hashable
    then: Callable[[], None] | None = None


class Engine:
    """A simulated engine. Its rows run at equal rates, so a virtual clock that counts tokens says when they end."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.version = 0
        self.clear()

    def clear(self) -> None:
        self.version += 1
        self.clock = self.at = 0.0
        self.running: list[tuple[float, int, Row, Dispatch, float]] = []
        self.waiting: list[tuple[Row, Dispatch]] = []
        self.cache: OrderedDict[Hashable, int] = OrderedDict()
        self.cached = 0

    @property
    def rate(self) -> float:
        return self.speed * min(ROW_SPEED, SPEED / max(1, len(self.running)))

    def advance(self, now: float) -> None:
        self.clock += (now - self.at) * self.rate
        self.at = now

    def lookup(self, row: Row) -> int:
        """Return how many tokens of the prompt are cached, and cache the prompt."""
        found = min(self.cache.get(row.key, 0), row.prompt) if row.key is not None else 0
        if row.key is not None:
            self.keep(row.key, row.prompt)
        return found

    def keep(self, key: Hashable, tokens: int) -> None:
        self.cached += max(tokens, self.cache.get(key, 0)) - self.cache.pop(key, 0)
        self.cache[key] = tokens
        while self.cached > CACHED and len(self.cache) > 1:
            self.cached -= self.cache.popitem(last=False)[1]


class Simulation:
    """One run of a setting with one routing policy.

    Args:
        setting: what is asked.
        policy: the routing.
        place: how the groups of a call are placed.
    """

    def __init__(self, setting: Setting, policy: Policy, place: Callable[..., Any] = assign) -> None:
        self.setting, self.policy, self.place = setting, policy, place
        self.random = random.Random(setting.seed)
        self.fleet = FleetState(FleetLimits(outage=1e9))
        self.now = 0.0
        self.out = Outcome()
        self.rows: dict[int, Row] = {}
        self.groups: dict[int, Group] = {}
        self.engines: dict[str, Engine] = {}
        self._numbers = itertools.count()
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def run(self) -> Outcome:
        setting = self.setting
        names = [f"r{number}" for number in range(setting.replicas)]
        slow = set(self.random.sample(names, round(setting.slow * setting.replicas)))
        for name in names:
            self.engines[name] = Engine(0.4 if name in slow else 1.0)
            self.obey(self.fleet.join, name)
        while self._events:
            self.step()
        for name in self.random.sample(names, round(setting.deaths * setting.replicas)):
            self.later(self.random.uniform(0.2, 0.8) * (setting.seconds or 60.0), self.die, name)
        self.ask([self.group(number) for number in range(setting.batch)])
        if setting.seconds:
            # Sessions go on by themselves, so only their first turns arrive.
            rate = setting.busy * SPEED * setting.replicas / 3 / mean_length()
            self.arrive(rate / SAMPLES, self.group, 0)
            self.arrive(rate / TURNS, self.session, 0)
            self.arrive(rate, self.single, 0)
        self.later(HEALTH, self.check_health)
        self.later(LOOK, self.look)
        while self._events:
            self.step()
        assert not self.fleet.rows.all, "rows are left"
        return self.out

    def later(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what, arguments))

    def step(self) -> None:
        self.now, _, what, arguments = heapq.heappop(self._events)
        what(*arguments)

    # Requests: each has its own random numbers, so that all ways of routing get the same --------------------------

    def drawn(self, kind: str, number: int) -> random.Random:
        return random.Random(f"{self.setting.seed} {kind} {number}")

    def arrive(self, per_second: float, make: Callable[[int], list[Row]], number: int) -> None:
        """Ask for the requests of one kind, one after the other."""
        if number:
            self.ask([make(number)])
        wait = self.drawn(make.__name__ + " arrives", number).expovariate(per_second)
        if self.now + wait < self.setting.seconds:
            self.later(wait, self.arrive, per_second, make, number + 1)

    def row(self, prompt: int, rng: random.Random, key: Hashable = None) -> Row:
        row = Row(next(self._numbers), self.now, prompt, length(rng), key)
        self.rows[row.number] = row
        return row

    def group(self, number: int) -> list[Row]:
        rng = self.drawn("group", number)
        prompt = round(min(8000, rng.lognormvariate(6.5, 0.8)))
        return [self.row(prompt, rng, ("group", number)) for _ in range(SAMPLES)]

    def single(self, number: int) -> list[Row]:
        # One row with one of the prompts that many share: few-shot examples, or the instructions of an agent.
        rng = self.drawn("single", number)
        which = rng.choices(range(PROMPTS), cum_weights=FREQUENCIES)[0]
        return [self.row(500 + which * 37 % 3500, rng, ("prompt", which) if self.setting.shared else None)]

    def session(self, number: int) -> list[Row]:
        rng = self.drawn("session", number)
        return [self.turn(("session", number), rng, 1000, round(rng.expovariate(1 / (TURNS - 1))))]

    def turn(self, key: Hashable, rng: random.Random, prompt: int, left: int) -> Row:
        """Return a turn of a session; when it is answered, the user thinks and asks again."""
        row = self.row(prompt, rng, key)
        longer = min(12_000, prompt + round(row.length) + 100)

        def ask_again() -> None:
            self.ask([[self.turn(key, rng, longer, left - 1)]])

        if left:
            thinks = rng.expovariate(1 / 3.0)
            row.then = lambda: self.later(thinks, ask_again)
        return row

    def ask(self, groups: Sequence[list[Row]]) -> None:
        """Give groups of rows to the fleet."""
        for rows in groups:
            group = Group(rows=tuple(row.number for row in rows), prompt=rows[0].prompt, new=EXPECTED, key=rows[0].key)
            for row in rows:
                self.groups[row.number] = group
            self.out.prompt_tokens += sum(row.prompt for row in rows)
        self.obey(self.fleet.add, [row.number for rows in groups for row in rows])

    # The fleet --------------------------------------------------------------------------------------------------------

    def obey(self, event: Callable[..., list[Decision]], *arguments: Any, **named: Any) -> None:
        """Pass an event to the state machine, carry out its decisions, and send the rows that wait."""
        started = time.process_time()
        decisions = event(*arguments, now=self.now, **named)
        self.out.in_events += time.process_time() - started
        self.out.events += 1
        for each in decisions:
            match each:
                case Start(run):
                    self.later(RESTART if run.number > 1 else 0.0, self.obey, self.fleet.opened, run)
                case AskCanary(run, epoch):
                    self.obey(self.fleet.canary, run, epoch, True)
                case Deliver(rows):
                    for number in rows:
                        self.answer(number)
                case Fail(number):
                    self.out.failed += 1
                    del self.rows[number], self.groups[number]
        self.send()

    def send(self) -> None:
        for number, name in self.fleet.isolated_retries():
            group = self.groups[number]
            self.depart(name, Group(rows=(number,), prompt=group.prompt, new=group.new, key=group.key))
        if not self.fleet.rows.fresh or not (loads := Loads(self.fleet.takers)):
            return
        waiting: dict[int, list[int]] = {}
        for number in self.fleet.rows.fresh:
            waiting.setdefault(id(self.groups[number]), []).append(number)
        groups = []
        for numbers in waiting.values():
            group = self.groups[numbers[0]]
            groups.append(Group(rows=tuple(numbers), prompt=group.prompt, new=group.new, key=group.key))
        started = time.process_time()
        placed = self.place(groups, loads, self.policy)
        self.out.deciding += time.process_time() - started
        self.out.decisions += len(placed)
        for name, group in placed:
            self.depart(name, group)

    def depart(self, name: str, group: Group) -> None:
        dispatch = self.fleet.send(name, dict.fromkeys(group.rows, group.work_of_a_row), self.now)
        engine = self.engines[name]
        engine.advance(self.now)
        for number in group.rows:
            engine.waiting.append((self.rows[number], dispatch))
        self.fill(name, engine)

    def answer(self, number: int) -> None:
        row = self.rows.pop(number)
        del self.groups[number]
        self.out.latencies.append(self.now - row.arrived)
        self.out.sampled += row.length
        self.out.makespan = self.now
        if row.then is not None:
            row.then()

    # Engines ----------------------------------------------------------------------------------------------------------

    def fill(self, name: str, engine: Engine) -> None:
        """Let waiting rows run while there are slots, and plan the next end of a row."""
        while engine.waiting and len(engine.running) < SLOTS:
            row, dispatch = engine.waiting.pop(0)
            found = engine.lookup(row)
            self.out.hits += found
            end = engine.clock + row.length + (row.prompt - found) * PROMPT_TOKEN
            heapq.heappush(engine.running, (end, next(self._order), row, dispatch, engine.clock))
        engine.version += 1
        if engine.running:
            left = max(0.0, engine.running[0][0] - engine.clock) / engine.rate
            self.later(left, self.end, name, engine.version)

    def end(self, name: str, version: int) -> None:
        """The first row of an engine ends."""
        engine = self.engines[name]
        if engine.version != version:
            return
        engine.advance(self.now)
        _, _, row, dispatch, _ = heapq.heappop(engine.running)
        if row.key is not None:
            engine.keep(row.key, row.prompt + round(row.length))
        self.fill(name, engine)
        self.obey(self.fleet.answered, dispatch.number, [row.number])

    def die(self, name: str) -> None:
        engine = self.engines[name]
        engine.advance(self.now)
        self.out.lost += sum(engine.clock - begun for *_, begun in engine.running)
        # What was computed is computed again, and its prompts are read again.
        engine.clear()
        engine.at = self.now
        self.obey(self.fleet.died, self.fleet.replicas[name].run, why="it was killed")

    def check_health(self) -> None:
        for replica in list(self.fleet.replicas.values()):
            if replica.state in (State.HEALTHY, State.SUSPECT):
                self.obey(self.fleet.heard, replica.run)
        self.obey(self.fleet.tick)
        if self.rows or self.now < self.setting.seconds:
            # Only isolated retries need frequent checks.
            busy = self.fleet.rows.accused or self.now < self.setting.seconds + 30
            self.later(HEALTH if busy else 60.0, self.check_health)

    def look(self) -> None:
        works = [
            sum(end - engine.clock for end, *_ in engine.running) + sum(row.length for row, _ in engine.waiting)
            for engine in self.engines.values()
        ]
        mean = sum(works) / len(works)
        if mean:
            self.out.imbalance.append(max(works) / mean)
        if self.now < (self.setting.seconds or 60.0):
            self.later(LOOK, self.look)


def length(rng: random.Random) -> float:
    return max(1.0, min(MOST_NEW, rng.lognormvariate(5.0, 1.2)))


def mean_length() -> float:
    rng = random.Random(1)
    return sum(length(rng) for _ in range(20_000)) / 20_000
