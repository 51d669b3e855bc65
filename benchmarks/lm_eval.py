"""lm-eval through corelm, compared with its own model `hf`: the same 200 multiple-choice prompts, four choices each.

    hf, batches of 16   lm-eval's `hf` on the same model object, padded rows
    hf, one at a time   the same with the batch size that lm-eval uses by default
    corelm              `CoreLM` over the transformers backend, as it comes

All requests of a task go through ``loglikelihood``, from texts to numbers, so tokenizing is included. "With examples"
has the same sentences before every prompt, as with ``--num_fewshot``; "without" has prompts that only their own four
choices share; "one letter" has choices of one token, for which `hf`, too, reads each prompt once. Before anything is
timed, all ways must give the same numbers within 1e-4.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import corelm
from benchmarks.measure import Figure, compare
from benchmarks.models import Shape, dialogues, named, random_model, tokenizer
from corelm.interop.lm_eval import CoreLM

SHAPE: Shape = (8_000, 256, 2)
PROMPTS, CHOICES = 200, 4
LINES = [turn["content"] for chat in dialogues() for turn in chat]


def figures(quick: bool) -> Iterator[list[Figure]]:
    model = random_model(SHAPE)
    with corelm.get_backend("transformers", model, tokenizer=tokenizer()) as backend:
        batches, ours = HFLM(model, tokenizer=tokenizer(), device="cpu", batch_size=16), CoreLM(backend)
        models = {"hf, batches of 16": batches, "corelm": ours}
        one = HFLM(model, tokenizer=tokenizer(), device="cpu", batch_size=1)
        works = {
            "with examples": (requests(shared=6, letters=False), models | {"hf, one at a time": one}),
            "without examples": (requests(shared=0, letters=False), models),
            "with examples, one letter": (requests(shared=6, letters=True), models),
        }
        for name, (asked, compared) in list(works.items())[: 1 if quick else None]:
            check_alike(compared, asked)
            ways = {way: partial(answered, each, asked) for way, each in compared.items()}
            yield compare(
                f"lm-eval: {PROMPTS} multiple-choice prompts {name}, {named(SHAPE)}",
                ways,
                baseline="hf, batches of 16",
                repeats=3 if quick else 5,
                goals={"corelm": 1.0},
                rows=len(asked),
                unit="request",
            )


def requests(shared: int, letters: bool) -> list[Instance]:
    """Return four requests for each prompt, which begins with `shared` sentences that all have in common."""
    drawn = random.Random(0)

    def text(sentences: int) -> str:
        return " ".join(drawn.choice(LINES) for _ in range(sentences))

    head = text(shared)
    prompts = [f"{head}\nQuestion: {text(2)}\nAnswer:" for _ in range(PROMPTS)]
    pairs = [(prompt, f" {letter if letters else text(1)}") for prompt in prompts for letter in "ABCD"[:CHOICES]]
    return [Instance("loglikelihood", doc={}, arguments=pair, idx=at) for at, pair in enumerate(pairs)]


def answered(model: Any, asked: list[Instance]) -> list[tuple[float, bool]]:
    found: list[tuple[float, bool]] = model.loglikelihood(asked, disable_tqdm=True)
    return found


def check_alike(models: dict[str, Any], asked: list[Instance]) -> None:
    """Raise unless all models give the same numbers, within 1e-4."""
    first, *others = (answered(model, asked) for model in models.values())
    for other in others:
        apart = max(abs(one - another) for (one, _), (another, _) in zip(first, other, strict=True))
        greedy = sum(one is not another for (_, one), (_, another) in zip(first, other, strict=True))
        if apart > 1e-4 or greedy:
            raise RuntimeError(f"the models differ by up to {apart:.1e} nats, and on {greedy} greedy continuations")
