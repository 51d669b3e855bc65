"""What it costs to record a call, compared with the same call without a recorder.

The transformers backend answers with a small model, as in `callers`; the toy backend takes almost no time itself, so
that a call shows what recording adds at most.

    bare        no recorder
    recorded    the same engine with a `CassetteRecorder`
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import corelm
from benchmarks.callers import small
from benchmarks.measure import Figure, compare
from benchmarks.models import dialogues, tokenizer
from corelm import Backend
from corelm_testing.cassette import CassetteRecorder
from corelm_testing.toy import ToyBackend

#: Goals: recording a call of a small model costs little; that of a toy, which computes nothing, shows what it costs.
GOAL, GOAL_TOY = 1.1, 2.0


def figures(quick: bool) -> Iterator[list[Figure]]:
    repeats = 3 if quick else 15
    texts = [turn["content"] for chat in dialogues() for turn in chat][:8]
    plain = corelm.get_backend("transformers", small(), tokenizer=tokenizer())
    toy = Backend.from_plugin(ToyBackend.open(), "toy")
    with tempfile.TemporaryDirectory() as folder:
        for work, backend, new, goal in (("a small model", plain, 32, GOAL), ("toy", toy, 32, GOAL_TOY)):
            recorder = CassetteRecorder(Path(folder, work))
            taped = Backend.from_plugin(backend.engine.plugin, work, wrappers=[recorder])
            prompts = backend.tokenize(texts).ids
            sampling = {"max_new_tokens": new, "ignore_eos": True, "seed": 1}
            engines = {"bare": backend, "recorded": taped}
            for how, ask in {"generate": partial(asked, prompts, sampling), "score": partial(scored, prompts)}.items():
                ways = {name: partial(ask, engine) for name, engine in engines.items()}
                title = f"{work}: {how}, {len(prompts)} rows" + (f", {new} tokens" if how == "generate" else "")
                yield compare(title, ways, baseline="bare", repeats=repeats, goals={"recorded": goal})
    plain.close()
    toy.close()


def asked(prompts: Any, sampling: dict[str, Any], backend: Backend) -> None:
    backend.generate(prompts, sampling)


def scored(prompts: Any, backend: Backend) -> None:
    backend.score_logprobs(prompts)
