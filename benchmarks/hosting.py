"""The cost of an engine in another process, compared with the same engine in this one.

    here      `get_backend(name, model)`
    a host    `get_backend(name, model, python=sys.executable)`

The first work takes the toy's engine next to no time, so what a host adds is the cost of a call. Wall-clock time is
measured, because a host is another process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import corelm
from benchmarks.callers import small
from benchmarks.measure import LONGER, Figure, compare
from benchmarks.models import tokenizer

#: Goal: the time for 64 prompts and 64 tokens each. A call should take at most 0.3 ms more.
GOAL = 1.05
NEW = 64
#: For a process that computes on one core, as this one does.
ONE_CORE = {"OMP_NUM_THREADS": "1"}


def figures(quick: bool) -> Iterator[list[Figure]]:
    repeats = 3 if quick else 15
    with corelm.get_backend("toy") as here, corelm.get_backend("toy", python=sys.executable, env=ONE_CORE) as host:
        yield compare(
            "one call: scoring a row of 2 ids with the toy",
            {"here": lambda: here.score_logprobs([[72, 101]]), "a host": lambda: host.score_logprobs([[72, 101]])},
            baseline="here",
            repeats=30,
            clock=time.perf_counter,
        )
        yield compare(
            "tokenizing 64 texts with the toy",
            {"here": lambda: here.tokenize(TEXTS), "a host": lambda: host.tokenize(TEXTS)},
            baseline="here",
            repeats=repeats,
            clock=time.perf_counter,
        )
    options = {"max_new_tokens": NEW, "ignore_eos": True}
    with (
        saved_model() as model,
        corelm.get_backend("transformers", model) as here,
        corelm.get_backend("transformers", model, python=sys.executable, env=ONE_CORE) as host,
    ):
        prompts = here.tokenize(TEXTS).ids.tolist()
        for count in (8,) if quick else (1, 64):
            rows = prompts[:count]
            yield compare(
                f"{count} prompt{'s' if count > 1 else ''}, {NEW} new tokens with log-probs",
                {"here": partial(here.generate, rows, options), "a host": partial(host.generate, rows, options)},
                baseline="here",
                repeats=repeats,
                goals={"a host": GOAL} if count > 1 else {},
                clock=time.perf_counter,
                longest=LONGER,
            )


@contextmanager
def saved_model() -> Iterator[Path]:
    """Yield a folder with a small model and its tokenizer. Other processes can open it meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        small().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        yield Path(folder)


TEXTS = [f"Number {n}: who are you, and how are you today?" for n in range(64)]
