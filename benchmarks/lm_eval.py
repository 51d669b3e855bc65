"""lm-eval through corelm, compared with its own model `hf`: the same multiple-choice prompts, four choices each.

    hf, batches of 16   lm-eval's `hf` on the same model object, padded rows
    hf, one at a time   the same with the batch size that lm-eval uses by default
    corelm              `CoreLM` over the transformers backend, as it comes

All requests of a task go through ``loglikelihood``, from texts to numbers, so tokenizing is included. "With examples"
has the same sentences before every prompt, as with ``--num_fewshot``; "without" has prompts that only their own four
choices share; "one letter" has choices of one token, for which `hf`, too, reads each prompt once. The last work has
1,000 questions that begin with the same 512 tokens, on a smaller model: `hf` reads 2.2 million tokens there. Before
anything is timed, all ways must give the same numbers within 1e-4.
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
from corelm_interop.lm_eval import CoreLM

SHAPE: Shape = (8_000, 256, 2)
PROMPTS, CHOICES = 200, 4
#: The work with many questions: its model, where Python and the tokenizer take the largest share, and its examples.
SMALL: Shape = (1024, 128, 2)
QUESTIONS, EXAMPLES = 1000, 512
#: So many requests are compared before the time is measured.
CHECKED = 400
#: Goal: three times as fast as `hf`.
GOAL_EXAMPLES = 1 / 3
LINES = [turn["content"] for chat in dialogues() for turn in chat]


def figures(quick: bool) -> Iterator[list[Figure]]:
    works = {
        "with examples": requests(PROMPTS, text(random.Random(1), 6)),
        "without examples": requests(PROMPTS, ""),
        "with examples, one letter": requests(PROMPTS, text(random.Random(1), 6), letters=True),
    }
    for at, (name, asked) in enumerate(list(works.items())[: 1 if quick else None]):
        what = f"{PROMPTS} multiple-choice prompts {name}"
        yield compared(what, SHAPE, asked, repeats=3 if quick else 5, goal=1.0, one_at_a_time=at == 0)
    count, head = 50 if quick else QUESTIONS, examples(EXAMPLES)
    what = f"{count:,} questions after the same {EXAMPLES} tokens"
    # One turn takes minutes, and the ratio is far from its goal.
    yield compared(what, SMALL, requests(count, head), repeats=3 if quick else 1, goal=GOAL_EXAMPLES)


def compared(
    what: str, shape: Shape, asked: list[Instance], *, repeats: int, goal: float, one_at_a_time: bool = False
) -> list[Figure]:
    """Compare the ways to answer these requests, after checking that all give the same numbers for some."""
    model = random_model(shape)
    with corelm.get_backend("transformers", model, tokenizer=tokenizer()) as backend:
        models = {
            "hf, batches of 16": HFLM(model, tokenizer=tokenizer(), device="cpu", batch_size=16),
            "corelm": CoreLM(backend),
        }
        if one_at_a_time:
            models["hf, one at a time"] = HFLM(model, tokenizer=tokenizer(), device="cpu", batch_size=1)
        check_alike(models, asked[:CHECKED])
        return compare(
            f"lm-eval: {what}, {named(shape)}",
            {way: partial(answered, each, asked) for way, each in models.items()},
            baseline="hf, batches of 16",
            repeats=repeats,
            goals={"corelm": goal},
            rows=len(asked),
            warm=True,
            unit="request",
        )


def text(drawn: random.Random, sentences: int) -> str:
    return " ".join(drawn.choice(LINES) for _ in range(sentences))


def examples(tokens: int) -> str:
    """Return sentences of so many tokens, the last of which is cut."""
    ids = tokenizer()(text(random.Random(1), tokens), verbose=False)["input_ids"]
    found: str = tokenizer().decode(ids[:tokens])
    return found


def requests(count: int, head: str, letters: bool = False) -> list[Instance]:
    """Return four requests for each of so many prompts, all of which begin with `head`."""
    drawn = random.Random(0)
    prompts = [f"{head}\nQuestion: {text(drawn, 2)}\nAnswer:" for _ in range(count)]
    pairs = [(prompt, f" {letter if letters else text(drawn, 1)}") for prompt in prompts for letter in "ABCD"[:CHOICES]]
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
