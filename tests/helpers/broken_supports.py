"""Plugins with one realistic defect each in what they say about kept ids and the most probable ids."""

from __future__ import annotations

from dataclasses import replace

import torch

from corelm import Ragged, TokenSets, hookimpl
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm_testing.toy import ToyBackend


class MassForgotten(ToyBackend):
    """The mass of the kept ids is 1, as if nothing had been cut off."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(request)
        mass = batch.kept_log_mass
        return batch if mass is None else replace(batch, kept_log_mass=mass.with_values(torch.zeros_like(mass.values)))


class MassBeforeTemperature(ToyBackend):
    """The mass of the kept ids is that of the model's own distribution."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(request)
        if batch.kept_ids is None:
            return batch
        before = torch.cat([request.prompts.values, batch.ids.values])
        masses = []
        for row, answer in enumerate(batch.ids.tolist()):
            tokens = [int(request.prompts.values[request.prompts.offsets[row + 1] - 1]), *answer]
            own = self.model(torch.tensor(tokens[:-1], device=before.device)).log_softmax(-1)
            sets = batch.kept_ids.tolist()[row]
            masses.append([float(own[at, kept].logsumexp(-1)) for at, kept in enumerate(sets)])
        return replace(batch, kept_log_mass=Ragged.from_list(masses, torch.float32))


class OneIdMore(ToyBackend):
    """An id that was cut off is among the kept ids."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(request)
        if batch.kept_ids is None:
            return batch
        vocab = range(self.capabilities.vocab_size)
        more = [
            [sorted({*ids, next(token for token in vocab if token not in ids)}) for ids in row]
            for row in batch.kept_ids.tolist()
        ]
        return replace(batch, kept_ids=TokenSets.from_list(more))


class SupportOfTheFirstAnswer(ToyBackend):
    """Every answer to the same prompt gets the mass of the first one's tokens."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(request)
        if batch.kept_log_mass is None:
            return batch
        first: dict[tuple[int, ...], list[float]] = {}
        prompts, masses = request.prompts.tolist(), []
        for prompt, own in zip(prompts, batch.kept_log_mass.tolist(), strict=True):
            known = first.setdefault(tuple(prompt), own)
            masses.append([known[at] if at < len(known) else mass for at, mass in enumerate(own)])
        return replace(batch, kept_log_mass=Ragged.from_list(masses, torch.float32))


class SupportIgnored(ToyBackend):
    """Scores are normalised over the whole vocabulary, and called truncated."""

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        batch = super().score_logprobs(replace(request, support=None))
        return batch if request.support is None else replace(batch, mode="processed", support="truncated")


class SupportBeforeTemperature(ToyBackend):
    """Scores over given ids are those of temperature 1."""

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        if request.support is None:
            return super().score_logprobs(request)
        return replace(super().score_logprobs(replace(request, temperature=1.0)), temperature=request.temperature)


class TopIdsOfTheModel(ToyBackend):
    """The most probable ids of processed answers are those of the model's own distribution."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(request)
        if not request.top_logprobs or request.logprobs == "raw":
            return batch
        raw = super().generate(replace(request, logprobs="raw"))
        # The token's own number is taken over, so that only the others are wrong.
        own = raw.top_ids.values == raw.ids.values[:, None]
        values = torch.where(own, batch.logprobs.values[:, None], raw.top_logprobs.values)
        ordered = values.sort(-1, descending=True)
        return replace(
            batch,
            top_ids=raw.top_ids.with_values(raw.top_ids.values.gather(-1, ordered.indices)),
            top_logprobs=raw.top_logprobs.with_values(ordered.values),
            tail_log_mass=raw.tail_log_mass,
        )


class TailOfTheLast(ToyBackend):
    """The tail of scores is the log-prob of the last of the most probable ids."""

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        batch = super().score_logprobs(request)
        if batch.top_logprobs is None:
            return batch
        return replace(batch, tail_log_mass=batch.tail_log_mass.with_values(batch.top_logprobs.values[:, -1]))


class TopIdsUntempered(ToyBackend):
    """The log-probs of the most probable ids of scores are those of temperature 1."""

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        batch = super().score_logprobs(request)
        if batch.top_logprobs is None or request.temperature == 1.0:
            return batch
        own = super().score_logprobs(replace(request, temperature=1.0))
        return replace(own, logprobs=batch.logprobs, mode=batch.mode, temperature=batch.temperature)
