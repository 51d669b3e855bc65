"""Many callers, while engines die, fail, restart and load weights at random: every row is answered once, and right."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from corelm.errors import BackendTimeoutError, EngineError
from corelm_fleet.records import FleetLimits
from helpers.insides import holds_rows, look_around
from helpers.mortal_toys import OTHER, TABLE, MortalToy, Toys, one_engine, user_rows
from helpers.processes import PATIENCE

#: The faults go on until there were so many of each kind.
DEATHS, UPDATES, ANSWERS = 8, 4, 40
CALLERS = 6
PROMPTS = [[72, n] for n in range(30, 50)]
SAMPLING: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.9}
LIMITS = FleetLimits(
    **{"misses": 2, "take_back": 0.05, "give_up": 0.2, "trial": 0.05, "backoff": 0.01, "longest_backoff": 0.03},
    **{"restarts": 10_000, "deaths": 10, "outage": 20.0},
)
TABLES = {"old": TABLE, "new": OTHER}
EXPECTED = {
    name: {
        (prompt[1], seed): one_engine(table).generate([prompt], SAMPLING, seeds=[seed]).ids.tolist()[0]
        for prompt in PROMPTS
        for seed in (1, 2)
    }
    for name, table in TABLES.items()
}


@pytest.mark.parametrize("concurrent", [True, False])
def test_every_row_is_answered_as_one_engine_answers_it(concurrent: bool) -> None:
    chance = random.Random(concurrent)
    weights, deaths, wrong, answered = {"0": "old"}, [0], list[Any](), list[Any]()
    stop = threading.Event()

    def before(engine: MortalToy, hook: str, request: Any) -> None:
        drawn = chance.random()
        if hook == "generate" and user_rows(request):
            if drawn < 0.03:
                deaths[0] += 1
                engine.die("at random")
            if drawn < 0.05:
                raise ValueError("at random")
            time.sleep(0.01 if drawn < 0.2 else 0.0)
        elif hook == "update_weights" and drawn < 0.1:
            deaths[0] += 1
            engine.die("while it loaded")

    def ask(number: int) -> None:
        own = random.Random(number)
        while not stop.is_set():
            prompts = [own.choice(PROMPTS) for _ in range(own.randint(1, 10))]
            seeds = [own.choice((1, 2)) for _ in prompts]
            timeout = 0.05 if own.random() < 0.05 else None
            try:
                found = toys.backend.generate(prompts, SAMPLING, seeds=seeds, timeout=timeout)
            except BackendTimeoutError:
                continue
            except Exception as error:
                wrong.append(error)
                continue
            (label,) = set(found.weight_versions or ())
            answered.append((label, prompts, seeds, found.ids.tolist()))

    with Toys("a", "b", "c", before=before, limits=LIMITS, concurrent_calls=concurrent) as toys:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(CALLERS)]
        for thread in threads:
            thread.start()
        end, updates, name = time.monotonic() + PATIENCE, 0, "old"
        try:
            while deaths[0] < DEATHS or updates < UPDATES or len(answered) < ANSWERS:
                assert time.monotonic() < end, (deaths, updates, len(answered))
                look_around(toys.backend)
                time.sleep(0.02)
                if chance.random() < 0.1:
                    updates += 1
                    label, new = f"v{updates}", chance.choice(("old", "new"))
                    weights[label] = new
                    try:
                        toys.backend.update_weights({"table": TABLES[new]}, label)
                        name = new
                    except EngineError:
                        # Every engine has died while it loaded. Core gives the old weights a new label.
                        weights[toys.backend.weight_version] = name
        finally:
            stop.set()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong, wrong[:3]
        for label, prompts, seeds, ids in answered:
            known = EXPECTED[weights[label]]
            assert ids == [known[prompt[1], seed] for prompt, seed in zip(prompts, seeds, strict=True)], label
        assert not holds_rows(toys.backend)
