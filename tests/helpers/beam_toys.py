"""A toy with beam search, and one whose beams are samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from corelm import hookimpl
from corelm.spec import GenerateRequest, GenerateResult, RowAnswer, generate_result
from corelm_testing.toy import ToyBackend


class Beams(ToyBackend):
    """No defect: it searches with `num_beams`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, sampling={**self.capabilities.sampling, "num_beams": None})

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.sampling.num_beams == 1:
            return super().generate(request)
        return generate_result(request, [self.search(prompt, request) for prompt in request.prompts.tolist()])

    @torch.no_grad()
    def search(self, prompt: list[int], request: GenerateRequest) -> RowAnswer:
        """Return the likeliest of the best beams; one that has ended competes with those that go on."""
        count, beams = request.sampling.num_beams, [(0.0, list[int]())]
        for _ in range(request.sampling.max_new_tokens or self.max_context - len(prompt)):
            grown = []
            for score, ids in beams:
                if ids and ids[-1] in request.stop_ids:
                    grown.append((score, ids))
                    continue
                best = self.model(torch.tensor((prompt + ids)[-1])).log_softmax(-1).topk(count)
                pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                grown += [(score + logprob, [*ids, token]) for logprob, token in pairs]
            beams = sorted(grown, reverse=True)[:count]
        ids = beams[0][1]
        return RowAnswer(ids, [0.0] * len(ids), "stop" if ids[-1] in request.stop_ids else "length")


class BeamsSampled(Beams):
    """Above temperature 0 it samples one answer, as if there were no beams."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.sampling.temperature > 0:
            request = replace(request, sampling=replace(request.sampling, num_beams=1))
        return super().generate(request)
