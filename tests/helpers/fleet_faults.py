"""A load test of fleets on real processes: callers ask, while processes are killed and stopped and weights change."""

import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from corelm import Backend
from corelm.errors import EngineError
from helpers.fleet_processes import Processes
from helpers.insides import holds_rows

#: Threads that ask at the same time, and the seeds of their rows.
CALLERS, SEEDS = 16, (1, 2)
#: Nats that log-probs may differ from those of one engine that was asked one row at a time.
TOLERANCE = 1e-4


def seconds(short: float) -> float:
    """Return how long a load test lasts: ``CORELM_FAULT_SECONDS``, or `short`."""
    return float(os.environ.get("CORELM_FAULT_SECONDS", short))


@dataclass(frozen=True)
class Answer:
    """What one engine says to a row: an answer sampled with a seed, and the scores of the prompt."""

    ids: list[int]
    logprobs: list[float]
    scores: list[float]


#: The answers by the number of the prompt and the seed.
Answers = Mapping[tuple[int, int], Answer]


def answers_of(backend: Backend, prompts: Sequence[list[int]], sampling: Mapping[str, Any]) -> Answers:
    """Return what an engine says if it is asked for one row at a time.

    Args:
        backend: the engine.
        prompts: the prompts.
        sampling: sampling parameters. Greedy rows are asked once.
    """
    found: dict[tuple[int, int], Answer] = {}
    greedy = sampling.get("temperature") == 0.0
    for number, prompt in enumerate(prompts):
        scores = backend.score_logprobs([prompt]).logprobs.values.tolist()
        for seed in SEEDS:
            if greedy and seed != SEEDS[0]:
                found[number, seed] = found[number, SEEDS[0]]
                continue
            answer = backend.generate([prompt], dict(sampling), seeds=None if greedy else [seed])
            assert answer.logprobs is not None
            found[number, seed] = Answer(answer.ids.tolist()[0], answer.logprobs.values.tolist(), scores)
    return found


@dataclass
class Counts:
    """What happened in a load test."""

    seconds: float = 0.0
    calls: int = 0
    sampled: int = 0
    scored: int = 0
    kills: int = 0
    stops: int = 0
    restarts: int = 0
    updates: int = 0
    updates_with_a_death: int = 0
    updates_that_failed: int = 0

    def __str__(self) -> str:
        told = [f"{name.replace('_', ' ')}: {value:g}" for name, value in asdict(self).items()]
        return ", ".join(told)


@dataclass(frozen=True)
class _Reply:
    """The result of one call.

    Attributes:
        keys: the number of the prompt and the seed of each row.
        floor: how many updates had returned when the call began.
        labels: the label of the weights of each row.
        ids: the answers; None if the rows were scored.
        logprobs: their log-probs, or the scores of the prompts.
    """

    keys: list[tuple[int, int]]
    floor: int
    labels: Sequence[str]
    ids: list[list[int]] | None
    logprobs: list[list[float]]


@dataclass
class FaultTest:
    """A load test.

    Args:
        backend: a fleet.
        processes: what it runs on.
        prompts: the prompts that are asked for.
        sampling: their sampling parameters.
        expected: what one engine says, by the name of the weights. The fleet begins with the first of them.
        weights: the folder of each; nothing never changes the weights.
        seed: of the faults and the requests.
        pause: mean seconds between two faults.
        last: how likely the last process that runs is hit. Servers take long to start, and rows wait without one.
        scoring: the share of calls that score.
    """

    backend: Backend
    processes: Processes
    prompts: Sequence[list[int]]
    sampling: Mapping[str, Any]
    expected: Mapping[str, Answers]
    weights: Mapping[str, Path] = field(default_factory=dict)
    seed: int = 0
    pause: float = 2.0
    last: float = 1.0
    scoring: float = 0.25

    def __post_init__(self) -> None:
        self.counts = Counts()
        self._chance = random.Random(self.seed)
        self._stopping = threading.Event()
        self._replies: list[_Reply] = []
        self._wrong: list[str] = []
        # The labels of weights: the number of the update that put them in force, and their name.
        self._labels = {self.backend.weight_version: (0, next(iter(self.expected)))}
        self._floor = 0
        self._later: list[tuple[float, Callable[[], None]]] = []

    def run(self, duration: float) -> Counts:
        """Run for `duration` seconds, check every answer, and print what happened.

        Raises:
            AssertionError: a row has no answer, or not the one of the weights that it names; or weights that it names
                were out of force when the call began.
        """
        callers = [threading.Thread(target=self._ask, args=(number,)) for number in range(CALLERS)]
        started = time.monotonic()
        for caller in callers:
            caller.start()
        try:
            self._provoke(started + duration)
        finally:
            self._stopping.set()
            self._go_on(math.inf)
        for caller in callers:
            caller.join(300)
        assert not any(caller.is_alive() for caller in callers), "a call has not ended"
        self.counts.seconds = round(time.monotonic() - started, 1)
        self.counts.restarts = self.processes.restarted()
        for reply in self._replies:
            self._check(reply)
        print(f"\n{self.counts}")
        assert not self._wrong, f"{len(self._wrong)} wrong: {self._wrong[:5]}"
        assert not holds_rows(self.backend), "rows are left"
        return self.counts

    # Callers ----------------------------------------------------------------------------------------------------------

    def _ask(self, number: int) -> None:
        own = random.Random(f"{self.seed} {number}")
        greedy = self.sampling.get("temperature") == 0.0
        while not self._stopping.is_set():
            keys = [(own.randrange(len(self.prompts)), own.choice(SEEDS)) for _ in range(own.randint(1, 6))]
            prompts, floor = [self.prompts[at] for at, _ in keys], self._floor
            try:
                if own.random() < self.scoring:
                    scores = self.backend.score_logprobs(prompts)
                    reply = _Reply(keys, floor, scores.weight_versions or (), None, _lists(scores.logprobs))
                else:
                    seeds = None if greedy else [seed for _, seed in keys]
                    found = self.backend.generate(prompts, dict(self.sampling), seeds=seeds)
                    reply = _Reply(keys, floor, found.weight_versions or (), found.ids.tolist(), _lists(found.logprobs))
            except Exception as error:
                self._wrong.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)
                continue
            self._replies.append(reply)

    def _check(self, reply: _Reply) -> None:
        self.counts.calls += 1
        if not len(reply.keys) == len(reply.labels) == len(reply.logprobs):
            self._wrong.append(f"{len(reply.keys)} rows, {len(reply.labels)} labels, {len(reply.logprobs)} answers")
            return
        for at, key in enumerate(reply.keys):
            label = reply.labels[at]
            if label not in self._labels:
                self._wrong.append(f"row {key} names weights that were never in force: {label!r}")
                continue
            update, name = self._labels[label]
            known = self.expected[name][key]
            if update < reply.floor:
                self._wrong.append(f"row {key} is of weights {label!r} after update {reply.floor} had returned")
            elif reply.ids is not None and reply.ids[at] != known.ids:
                others = [other for other in self.expected if self.expected[other][key].ids == reply.ids[at]]
                self._wrong.append(f"row {key} of {label!r}: {reply.ids[at]} instead of {known.ids}; it is {others}'s")
            elif not _near(reply.logprobs[at], known.scores if reply.ids is None else known.logprobs):
                self._wrong.append(f"row {key} of {label!r} has other log-probs")
            elif reply.ids is None:
                self.counts.scored += 1
            else:
                self.counts.sampled += 1

    # Faults -----------------------------------------------------------------------------------------------------------

    def _provoke(self, end: float) -> None:
        deeds = [self._stop, *([self._update] if self.weights else []), self._kill]
        # Every kind of fault occurs, also in a short run.
        first, due = [*deeds], 0.0
        while (now := time.monotonic()) < end:
            self._go_on(now)
            if now >= due:
                (first.pop(0) if first else self._chance.choice(deeds))()
                due = time.monotonic() + self._chance.uniform(0.2, 1.8) * self.pause
            time.sleep(0.02)

    def _go_on(self, now: float) -> None:
        """Continue or kill the processes that have been stopped for long enough."""
        due = [action for when, action in self._later if when <= now]
        self._later = [each for each in self._later if each[0] > now]
        for action in due:
            action()

    def _kill(self) -> None:
        victim = self._victim()
        if victim is not None:
            self.counts.kills += self.processes.kill(victim)

    def _stop(self) -> None:
        """Stop a process for a while: it is noticed or not, and sometimes killed in the end."""
        victim = self._victim()
        if victim is None:
            return
        self.counts.stops += self.processes.stop(victim)
        killed = self._chance.random() < 0.3

        def go_on() -> None:
            if killed:
                self.counts.kills += self.processes.kill(victim)
            else:
                self.processes.resume(victim)

        self._later.append((time.monotonic() + self._chance.uniform(0.2, 12.0), go_on))

    def _update(self) -> None:
        """Load weights, and sometimes kill a process meanwhile."""
        number = self.counts.updates + 1
        name, label = self._chance.choice(list(self.weights)), f"update {number}"
        self._labels[label] = number, name
        before = self._labels[self.backend.weight_version][1]
        # Stopped processes would hold the update up for longer than a short test lasts.
        self._go_on(math.inf)
        kills = self.counts.kills
        killer = threading.Timer(self._chance.uniform(0.0, 0.1), self._kill)
        dies = number == 1 or self._chance.random() < 0.5
        if dies:
            killer.start()
        try:
            self.backend.update_weights(self.weights[name], label)
        except EngineError:
            # No replica has loaded them. The old weights serve under a new label.
            self.counts.updates_that_failed += 1
            self._labels[self.backend.weight_version] = number, before
        self.counts.updates = self._floor = number
        if dies:
            killer.join()
        self.counts.updates_with_a_death += self.counts.kills > kills

    def _victim(self) -> Any:
        """Return a process to hit, or None."""
        victims = self.processes.victims()
        if not victims or (len(victims) == 1 and self._chance.random() >= self.last):
            return None
        return self._chance.choice(victims)


def _lists(logprobs: Any) -> list[list[float]]:
    assert logprobs is not None
    return [row.tolist() for row in logprobs.split()]


def _near(found: Iterable[float], known: Iterable[float]) -> bool:
    found, known = torch.tensor(list(found)), torch.tensor(list(known))
    return found.shape == known.shape and torch.allclose(found, known, rtol=0, atol=TOLERANCE)
