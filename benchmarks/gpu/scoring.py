"""Scoring with the transformers plugin: time, memory with gradients, and waits for the GPU.

padded    what users usually write: sort, pad, forward, float32, `log_softmax`, `gather`, in slices of 512 positions
backend   ``backend.score_logprobs``
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import corelm
from benchmarks.gpu.device import Size, clock, device, memory, ragged_lengths, random_ids, random_model, value
from benchmarks.measure import Figure, compare
from benchmarks.models import tokenizer
from corelm import Backend

#: Tokens of a padded batch, padding included.
_TOKENS = 32_768
_SLICE = 512


def figures(size: Size) -> Iterator[list[Figure]]:
    model = random_model(size)
    backend = corelm.get_backend("transformers", model, tokenizer=tokenizer())
    lengths = ragged_lengths(size)
    even = [size.longest] * max(2, sum(lengths) // size.longest)
    batches = {
        f"{size.rows} rows of {size.shortest} to {size.longest}": (random_ids(size, lengths), 0.7),
        f"{len(even)} rows of {size.longest}": (random_ids(size, even), 0.95),
        f"{16 * size.rows} rows of 64": (random_ids(size, [64] * 16 * size.rows), 1.0),
    }
    for name, (rows, goal) in batches.items():
        ways = {
            "padded": lambda rows=rows: padded(model, rows),
            "backend": lambda rows=rows: backend.score_logprobs(rows),
        }
        goals = {"backend": goal}
        yield compare(f"scoring {name}", ways, baseline="padded", repeats=size.repeats, clock=clock, goals=goals)
    yield agreement(backend, size)
    yield errors(backend, model, size)
    yield waits(backend, random_ids(size, even))
    yield with_gradients(backend, model, random_ids(size, [size.longest] * min(8, len(even))))


@torch.no_grad()
def padded(model: Any, rows: list[list[int]], *, start: int = 1, tokens: int = _TOKENS) -> list[Tensor]:
    """Return the log-probs of each row's tokens from `start` on, with `tokens` tokens of padded rows a forward."""
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    found: dict[int, Tensor] = {}
    while order:
        width = len(rows[order[0]])
        taken, order = order[: max(1, tokens // width)], order[max(1, tokens // width) :]
        ids = torch.zeros(len(taken), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for line, row in enumerate(taken):
            ids[line, : len(rows[row])] = torch.tensor(rows[row])
            mask[line, : len(rows[row])] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        states = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, start - 1 : -1]
        parts = zip(states.split(_SLICE, 1), ids[:, start:].split(_SLICE, 1), strict=True)
        table = torch.cat(
            [model.lm_head(some).float().log_softmax(-1).gather(-1, next_[..., None])[..., 0] for some, next_ in parts],
            1,
        ).cpu()
        found |= {row: table[line, : len(rows[row]) - start] for line, row in enumerate(taken)}
    return [found[row] for row in range(len(rows))]


def agreement(backend: Backend, size: Size) -> list[Figure]:
    """Compare the log-probs of generated tokens with those of scoring the same tokens."""
    prompts = random_ids(size, [32] * 16)
    answers = backend.generate(prompts, {"max_new_tokens": min(128, 2 * size.new), "seed": 1})
    whole = [prompt + answer for prompt, answer in zip(prompts, answers.ids.tolist(), strict=True)]
    scores = backend.score_logprobs(whole, score_from=[32] * len(whole))
    assert answers.logprobs is not None
    apart = (answers.logprobs.values.cpu() - scores.logprobs.values[scores.scored.values].cpu()).abs()
    work = f"generated against scored log-probs, {size.dtype}"
    return [value(work, "mean", float(apart.mean()), 0.02), value(work, "largest", float(apart.max()), 0.5)]


@torch.no_grad()
def errors(backend: Backend, model: Any, size: Size) -> list[Figure]:
    """Compare scores, and log-probs of generated tokens, with a float32 forward of each row alone."""
    exact = copy.deepcopy(model).float()
    start = random_ids(size, [size.longest // 8], seed=2)[0]
    rows = [start + rest for rest in random_ids(size, [size.longest // length for length in range(4, 12)], seed=3)]

    def alone(one: Any) -> Tensor:
        return torch.cat([padded(one, [row])[0] for row in rows])

    truth = alone(exact)
    scores = backend.score_logprobs(rows)
    found = scores.logprobs.values[scores.scored.values].cpu()
    plain = float((alone(model) - truth).abs().mean())
    made = backend.generate(rows, {"max_new_tokens": size.new // 2, "seed": 1, "ignore_eos": True})
    whole = [[*row, *answer] for row, answer in zip(rows, made.ids.tolist(), strict=True)]
    assert made.logprobs is not None
    answers = torch.cat([padded(exact, [ids])[0][len(row) - 1 :] for row, ids in zip(rows, whole, strict=True)])
    work = f"mean error to a float32 forward of each row alone, {size.dtype}"
    return [
        value(work, "forward of each row alone", plain),
        value(work, "scores", float((found - truth).abs().mean()), 1.1 * plain + 1e-5),
        value(
            work, "generated log-probs", float((made.logprobs.values.cpu() - answers).abs().mean()), 1.1 * plain + 1e-5
        ),
    ]


def waits(backend: Backend, rows: list[list[int]]) -> list[Figure]:
    """Count how often a scoring call waits for the GPU."""
    if not torch.cuda.is_available():
        return []
    with warnings.catch_warnings(record=True) as caught, _noticing_waits():
        warnings.simplefilter("always")
        backend.score_logprobs(rows)
    # The goal is three for each of the three passes of the full size.
    return [value(f"waits for the GPU in a scoring call of {len(rows)} rows", "backend", len(caught), 9)]


@contextlib.contextmanager
def _noticing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def with_gradients(backend: Backend, model: Any, rows: list[list[int]]) -> list[Figure]:
    """Measure the memory of a training step, also under autocast, which must not keep logits for the backward pass."""
    model.gradient_checkpointing_enable()
    model.train()

    def step() -> None:
        model.zero_grad()
        backend.score_logprobs(rows, grad=True).logprobs.values.sum().backward()

    def under_autocast() -> None:
        with torch.autocast(device(), torch.bfloat16):
            step()

    work = f"memory of log-probs and gradients, {len(rows)} rows of {len(rows[0])}"
    plain = memory(work, {"as it is": step}, {})
    allowed = max((figure.mib or 0 for figure in plain), default=0) + 512
    autocast = memory(work, {"under autocast": under_autocast}, {"under autocast": allowed})
    model.eval()
    return [*plain, *autocast]
