"""The cost of a fleet, and what a second replica brings, compared with one engine.

    here                `get_backend(name)`
    a fleet             two engines in this process as one
    one process         `get_backend(name, model, python=sys.executable)`, whose engine computes on one core
    one on all cores    the same, whose engine computes on all cores
    two replicas        `replicas=2`, each on one core

The first work takes the toy's engine next to no time, so what a fleet adds is the cost of a call. Wall-clock time is
measured, because replicas are other processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial

import corelm
from benchmarks.hosting import NEW, ONE_CORE, TEXTS, saved_model
from benchmarks.measure import LONGER, Figure, compare
from corelm import Backend
from corelm_fleet.fleet import FleetEngine
from corelm_fleet.replica import Member
from corelm_testing.toy import ToyBackend

#: Goal: two replicas on two cores answer as much as 1.8 engines on one core.
GOAL = 1 / 1.8


def figures(quick: bool) -> Iterator[list[Figure]]:
    members = [Member(name, ToyBackend.open) for name in ("one", "two")]
    with corelm.get_backend("toy") as here, Backend.from_plugin(FleetEngine(members), "fleet") as fleet:
        for count in (1, 64):
            rows = [[72, 101]] * count
            yield compare(
                f"one call: scoring {count} row{'s' if count > 1 else ''} of 2 ids with the toy",
                {"here": partial(here.score_logprobs, rows), "a fleet": partial(fleet.score_logprobs, rows)},
                baseline="here",
                repeats=30,
                clock=time.perf_counter,
            )
    options = {"max_new_tokens": NEW, "ignore_eos": True}
    all_cores = {"OMP_NUM_THREADS": str(os.cpu_count())}
    with saved_model() as model:
        hosted = partial(corelm.get_backend, "transformers", model, python=sys.executable)
        with hosted(env=ONE_CORE) as one, hosted(env=all_cores) as wide, hosted(env=ONE_CORE, replicas=2) as two:
            prompts = one.tokenize(TEXTS).ids.tolist()
            ways = {"one process": one, "one on all cores": wide, "two replicas": two}
            for count in (8,) if quick else (16, 64):
                yield compare(
                    f"{count} prompts, {NEW} new tokens with log-probs",
                    {name: partial(backend.generate, prompts[:count], options) for name, backend in ways.items()},
                    baseline="one process",
                    repeats=3 if quick else 15,
                    goals={"two replicas": GOAL} if count == 64 else {},
                    clock=time.perf_counter,
                    longest=LONGER,
                )
