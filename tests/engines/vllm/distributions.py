"""The distributions that tokens are drawn from: the plain forward of the model, and a plain loop over its positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from corelm import SamplingParams
from helpers import oracle


def distributions(model: nn.Module, row: Sequence[int], sampling: SamplingParams) -> Tensor:
    """Return float64[len(row), V]: the log-probs that each token of `row` was drawn under; those of token 0 are 0.

    Temperature, top-k, top-p and min-p, in this order. Without penalties.
    """
    logits = oracle.next_logits(model, row)[:-1].double()
    rows = [truncated(each, sampling) for each in logits]
    return torch.stack([torch.zeros(logits.shape[1], dtype=torch.float64), *rows])


def truncated(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the log-probs after truncation of one position; -inf where an id has lost its probability."""
    if sampling.temperature == 0:
        out = torch.full_like(logits, -torch.inf)
        out[logits.argmax()] = 0.0
        return out
    chances = [(chance, token) for token, chance in enumerate((logits / sampling.temperature).softmax(-1).tolist())]
    chances.sort(reverse=True)
    kept = chances[: sampling.top_k or len(chances)]
    total, before, left = sum(chance for chance, _ in kept), 0.0, []
    for chance, token in kept:
        if before < sampling.top_p * total:
            left.append((chance, token))
        before += chance
    left = [(chance, token) for chance, token in left if chance >= sampling.min_p * left[0][0]]
    mass = torch.tensor(sum(chance for chance, _ in left), dtype=torch.float64)
    out = torch.full_like(logits, -torch.inf)
    for chance, token in left:
        out[token] = torch.tensor(chance, dtype=torch.float64).log() - mass.log()
    return out
