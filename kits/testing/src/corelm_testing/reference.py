"""The expected effect of sampling parameters, computed from the oracle's numbers, and a goodness-of-fit test."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from corelm import Backend, SamplingParams
from corelm_testing.base import not_applicable
from corelm_testing.usage import in_range, legal

#: Prompts of text: after random ids alone, a trained model has little to say.
OPENINGS = ("Where is the", "What does the sea do?", "The cat is", "It is so", "A small bird sings", "When", "Who are")

#: The smallest accepted p-value. A correct backend falls below it in one of a million tests; with fixed seeds, always
#: or never.
MIN_P_VALUE = 1e-6

#: The longest context to fill: a longer one would take a slow backend too long.
LONGEST = 4096

_EXPECTED_PER_CELL = 8


def seeded(backend: Backend, sampling: Mapping[str, Any], seed: int = 1) -> dict[str, Any]:
    """Return `sampling` with a seed if the backend supports one, so that a test repeats exactly."""
    return {**sampling, "seed": seed} if backend.capabilities.per_answer_seeds else dict(sampling)


def repeatable(backend: Backend, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return `sampling` changed so that two calls give the same answers: greedy if possible, else with a seed."""
    return {**sampling, "temperature": 0.0} if legal(backend, "temperature", 0.0) else seeded(backend, sampling)


def temperatures(backend: Backend, *preferred: float) -> list[float]:
    """Return temperatures other than 0 and 1; the running test is not applicable if the backend declares none."""
    return in_range(backend, "temperature", *preferred) or not_applicable("needs a temperature other than 0 and 1")


def reshaped(
    logprobs: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return float64[V]: the probabilities to sample from, given the model's own log-probs[V]."""
    mass = (logprobs.double() / temperature).softmax(-1)
    kept = mass.argsort(descending=True)[:top_k]
    if top_p < 1.0:
        share = mass[kept] / mass[kept].sum()
        kept = kept[share.cumsum(0) - share < top_p]
    kept = kept[mass[kept] >= min_p * mass[kept[0]]]
    out = torch.zeros_like(mass).index_copy(0, kept, mass[kept])
    return out / out.sum()


def sampled_from(logprobs: Tensor, sampling: SamplingParams, answer: list[int], stop_ids: Collection[int]) -> Tensor:
    """Return float64[V]: the log-probs of the distribution that the token after `answer` is drawn from.

    The repetition penalty is left out: its size depends on the sign of a logit, which log-probs do not show.

    Args:
        logprobs: the model's own log-probs[V] at this position.
        sampling: how to sample; not greedy.
        answer: the ids of the answer so far.
        stop_ids: the ids that would end it.
    """
    counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=len(logprobs))
    logits = logprobs.double() - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if len(answer) < sampling.min_new_tokens:
        logits = logits.index_fill(0, torch.tensor(sorted(stop_ids), dtype=torch.int64), -math.inf)
    cuts = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return reshaped(logits, temperature=sampling.temperature, **cuts).log()  # type: ignore[arg-type]


def gaps(logprobs: Tensor, least: float) -> list[int]:
    """Return every k ≥ 2 for which the k likeliest ids lead all others by at least `least` nats."""
    best = logprobs.double().sort(descending=True).values
    return [k for k in ((best[:-1] - best[1:] >= least).nonzero().flatten() + 1).tolist() if k >= 2]


def top_p_of(logprobs: Tensor, k: int) -> float:
    """Return a `top_p` that keeps exactly the k likeliest ids."""
    total = logprobs.double().softmax(-1).sort(descending=True).values.cumsum(0)
    return float(total[k - 2] + total[k - 1]) / 2


def min_p_of(logprobs: Tensor, k: int) -> float:
    """Return a `min_p` that keeps exactly the k likeliest ids."""
    best = logprobs.double().sort(descending=True).values
    return float(((best[k - 1] + best[k]) / 2 - best[0]).exp())


def p_value(ids: Tensor, mass: Tensor) -> float:
    """Return the p-value of Pearson's chi-square test that `ids` were drawn from `mass` (float64[V]).

    It is 0.0 if an id with probability 0 was drawn. Ids of low probability share a cell, so that the expected count of
    each cell is large enough for the test.
    """
    if not bool((mass[ids] > 0).all()):
        return 0.0
    counts = torch.bincount(ids, minlength=len(mass)).tolist()
    cells = [[0.0, 0.0]]
    for token in mass.argsort(descending=True).tolist():
        if cells[-1][1] >= _EXPECTED_PER_CELL:
            cells.append([0.0, 0.0])
        cells[-1][0] += counts[token]
        cells[-1][1] += float(mass[token]) * len(ids)
    if len(cells) > 1 and cells[-1][1] < _EXPECTED_PER_CELL:
        rest = cells.pop()
        cells[-1] = [cells[-1][0] + rest[0], cells[-1][1] + rest[1]]
    observed, expected = torch.tensor(cells, dtype=torch.float64).unbind(-1)
    statistic = ((observed - expected).square() / expected).sum()
    # The upper tail of chi-square with n − 1 degrees of freedom; a single cell cannot be tested.
    freedom = len(cells) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2)) if freedom else 1.0


def enough_draws(mass: Tensor, wrong: Tensor, most: int) -> int:
    """Return how many draws show that they are from `wrong` and not from `mass`, both float64[V]; at most `most`.

    With so few, the test failed in each of 32 tries, and by a factor of a thousand.
    """
    generator = torch.Generator().manual_seed(0)
    for draws in (most // 16, most // 8, most // 4, most // 2):
        tries = torch.multinomial(wrong, 32 * draws, replacement=True, generator=generator).reshape(32, draws)
        if max(p_value(ids, mass) for ids in tries) < MIN_P_VALUE / 1000:
            return draws
    return most
