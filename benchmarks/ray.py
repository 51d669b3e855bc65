"""Compare the cost of a Ray replica with that of the same engine here, and in a process of its own.

    here        `get_backend(name, model)`
    a host      `get_backend(name, model, python=sys.executable)`
    an actor    `get_backend("ray", model, inner=name)`, in a Ray of this machine

The first work takes the toy's engine next to no time, so what an actor adds is the cost of a call. Wall-clock time is
measured, because an actor is another process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial

import corelm
from benchmarks.hosting import NEW, ONE_CORE, TEXTS, saved_model
from benchmarks.measure import LONGER, Figure, compare

#: An actor computes on one core, as everything else here.
get_ray = partial(corelm.get_backend, "ray", num_cpus=1)


def figures(quick: bool) -> Iterator[list[Figure]]:
    with (
        corelm.get_backend("toy") as here,
        corelm.get_backend("toy", python=sys.executable, env=ONE_CORE) as host,
        get_ray(inner="toy") as actor,
    ):
        ways = {"here": here, "a host": host, "an actor": actor}
        for count in (1, 64):
            rows = [[72, 101]] * count
            yield compare(
                f"one call: scoring {count} row{'s' if count > 1 else ''} of 2 ids with the toy",
                {name: partial(backend.score_logprobs, rows) for name, backend in ways.items()},
                baseline="here",
                repeats=30,
                clock=time.perf_counter,
            )
    options = {"max_new_tokens": NEW, "ignore_eos": True}
    with (
        saved_model() as model,
        corelm.get_backend("transformers", model) as here,
        get_ray(model, inner="transformers") as actor,
    ):
        ways = {"here": here, "an actor": actor}
        prompts = here.tokenize(TEXTS[:8] if quick else TEXTS).ids.tolist()
        yield compare(
            f"{len(prompts)} prompts, {NEW} new tokens with log-probs",
            {
                name: partial(each.generate, prompts, options)
                for name, each in {"here": here, "an actor": actor}.items()
            },
            baseline="here",
            repeats=3 if quick else 15,
            clock=time.perf_counter,
            longest=LONGER,
        )
