"""A toy with every kind of truncation, and toys that apply them in another order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from corelm import SamplingParams
from corelm.spec import GenerateRequest
from corelm_testing.toy import ToyBackend


class Truncating(ToyBackend):
    """No defect: it has top-p and min-p as well, applied in the right order."""

    steps: ClassVar = ("temperature", "top_k", "top_p", "min_p")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        more = {**self.capabilities.sampling, "top_p": None, "min_p": None}
        # The toy tells kept ids and their mass of top-k only.
        self.capabilities = replace(self.capabilities, sampling=more, return_support=False)

    def _distributions(
        self, logits: Tensor, prompt: list[int], answer: list[int], request: GenerateRequest
    ) -> tuple[Tensor, Tensor]:
        sampling = request.sampling
        if sampling.greedy:
            return super()._distributions(logits, prompt, answer, request)
        banned = sorted(request.stop_ids) if len(answer) < sampling.min_new_tokens else []
        found = logits.index_fill(0, torch.tensor(banned, dtype=torch.int64), -math.inf).log_softmax(-1)
        for step in self.steps:
            found = applied(step, found, sampling).log_softmax(-1)
        return found, found if request.logprobs == "processed" else logits.log_softmax(-1)


def applied(step: str, found: Tensor, sampling: SamplingParams) -> Tensor:
    """Return log-probs[V] after one step, not normalised."""
    if step == "temperature":
        return found / sampling.temperature
    best = found.sort(descending=True)
    if step == "top_k":
        out = torch.arange(len(found)) >= (sampling.top_k or len(found))
    elif step == "top_p":
        mass = best.values.exp()
        out = (mass.cumsum(0) - mass >= sampling.top_p) & (sampling.top_p < 1)
    else:
        out = best.values.exp() < sampling.min_p * best.values[0].exp()
    return found.index_fill(0, best.indices[out], -math.inf)


class TopPBeforeTemperature(Truncating):
    """Top-p cuts the distribution that the temperature has not changed yet."""

    steps = ("top_k", "top_p", "temperature", "min_p")


class MinPBeforeTemperature(Truncating):
    """Min-p cuts first, as in some engines."""

    steps = ("min_p", "temperature", "top_k", "top_p")


class TopPBeforeTopK(Truncating):
    """Top-p cuts before top-k."""

    steps = ("temperature", "top_p", "top_k", "min_p")


class MinPBeforeTopP(Truncating):
    """Min-p cuts before top-p, which then finds less mass."""

    steps = ("temperature", "top_k", "min_p", "top_p")


class MinPNotNormalised(Truncating):
    """Its processed log-probs are not normalised again after min-p."""

    def _distributions(
        self, logits: Tensor, prompt: list[int], answer: list[int], request: GenerateRequest
    ) -> tuple[Tensor, Tensor]:
        left, reported = super()._distributions(logits, prompt, answer, request)
        if request.logprobs == "processed":
            uncut = replace(request, sampling=replace(request.sampling, min_p=0.0))
            _, reported = super()._distributions(logits, prompt, answer, uncut)
        return left, reported
