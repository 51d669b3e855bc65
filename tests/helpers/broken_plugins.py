"""Plugins with one realistic defect each, which the conformance kit must find.

Those without a defect, of which some inherit, are in `capable_plugins`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from corelm import Ragged, SamplingParams, hookimpl
from corelm.spec.records import (
    ContainerRequest,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    WeightUpdate,
)
from corelm_testing.toy import ToyBackend
from helpers.adapter_toys import AdapterToy as AdapterToy
from helpers.beam_toys import Beams as Beams
from helpers.beam_toys import BeamsSampled as BeamsSampled
from helpers.broken_adapters import AdapterIgnoredWhileScoring as AdapterIgnoredWhileScoring
from helpers.broken_adapters import AdaptersLostInSleep as AdaptersLostInSleep
from helpers.broken_adapters import AdapterStaysOn as AdapterStaysOn
from helpers.broken_adapters import DroppedBeforeRefused as DroppedBeforeRefused
from helpers.broken_adapters import FirstVersionKept as FirstVersionKept
from helpers.broken_adapters import MergedIntoBase as MergedIntoBase
from helpers.broken_adapters import UnknownIsBase as UnknownIsBase
from helpers.broken_sleepers import CopyOutlivesUpdate as CopyOutlivesUpdate
from helpers.broken_sleepers import WakesAsBefore as WakesAsBefore
from helpers.broken_sleepers import WeightsLostInSleep as WeightsLostInSleep
from helpers.broken_supports import MassBeforeTemperature as MassBeforeTemperature
from helpers.broken_supports import MassForgotten as MassForgotten
from helpers.broken_supports import OneIdMore as OneIdMore
from helpers.broken_supports import SupportBeforeTemperature as SupportBeforeTemperature
from helpers.broken_supports import SupportIgnored as SupportIgnored
from helpers.broken_supports import SupportOfTheFirstAnswer as SupportOfTheFirstAnswer
from helpers.broken_supports import TailOfTheLast as TailOfTheLast
from helpers.broken_supports import TopIdsOfTheModel as TopIdsOfTheModel
from helpers.broken_supports import TopIdsUntempered as TopIdsUntempered
from helpers.broken_timeouts import NeverStops as NeverStops
from helpers.broken_timeouts import RaisesAndGoesOn as RaisesAndGoesOn
from helpers.capable_plugins import Abortable, Modest, Reshaping, Scaled
from helpers.capable_plugins import Sleeper as Sleeper
from helpers.in_flight_toys import InFlight as InFlight
from helpers.in_flight_toys import RunsTooEarly as RunsTooEarly
from helpers.in_flight_toys import RunsTooLate as RunsTooLate
from helpers.in_flight_toys import UpdateUnsaid as UpdateUnsaid
from helpers.truncating_toys import MinPBeforeTemperature as MinPBeforeTemperature
from helpers.truncating_toys import MinPBeforeTopP as MinPBeforeTopP
from helpers.truncating_toys import MinPNotNormalised as MinPNotNormalised
from helpers.truncating_toys import TopPBeforeTemperature as TopPBeforeTemperature
from helpers.truncating_toys import TopPBeforeTopK as TopPBeforeTopK
from helpers.truncating_toys import Truncating as Truncating


class CutThoughScaled(Scaled):
    """Its scaled log-probs depend on the truncation too."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(replace(request, logprobs="processed"))
        return batch if request.logprobs == "processed" else replace(batch, mode="raw", temperature=1.0, support="full")


class RawReshaped(Reshaping):
    """Its raw log-probs are those after penalties, bias and banned ids, before temperature and truncation."""

    def _distributions(
        self, logits: Tensor, prompt: list[int], answer: list[int], request: GenerateRequest
    ) -> tuple[Tensor, Tensor]:
        sampled_from, reported = super()._distributions(logits, prompt, answer, request)
        if request.logprobs == "raw":
            plain = SamplingParams.make(request.sampling, temperature=1.0, top_k=None)
            asked = replace(request, sampling=plain, logprobs="processed")
            _, reported = super()._distributions(logits, prompt, answer, asked)
        return sampled_from, reported


class ProcessedUnreshaped(Reshaping):
    """Its processed log-probs know temperature and truncation, but neither penalties nor banned ids."""

    def _distributions(
        self, logits: Tensor, prompt: list[int], answer: list[int], request: GenerateRequest
    ) -> tuple[Tensor, Tensor]:
        sampled_from, reported = super()._distributions(logits, prompt, answer, request)
        if request.logprobs == "processed":
            free = replace(request, stop_ids=frozenset())
            # Not from `Reshaping`: without the penalties.
            _, reported = super(Reshaping, self)._distributions(logits, prompt, answer, free)
        return sampled_from, reported


class PenaltyAfterTemperature(Reshaping):
    """Penalties are subtracted from the logits that the temperature has divided."""

    def reshaped(self, logits: Tensor, prompt: list[int], answer: list[int], request: GenerateRequest) -> Tensor:
        temperature = request.sampling.temperature or 1.0
        return super().reshaped(logits / temperature, prompt, answer, request) * temperature


class FirstIdUnpenalised(Reshaping):
    """The repetition penalty leaves out the first id of the prompt, as if it were a BOS."""

    def penalised(self, prompt: list[int], answer: list[int]) -> set[int]:
        return {*prompt[1:], *answer}


class LastIdsPenalised(Reshaping):
    """The repetition penalty counts the last 64 ids only."""

    def penalised(self, prompt: list[int], answer: list[int]) -> set[int]:
        return {*(prompt + answer)[-64:]}


class EngineKwargsIgnored(Reshaping):
    """engine_kwargs are declared and ignored."""

    def reshaped(self, logits: Tensor, prompt: list[int], answer: list[int], request: GenerateRequest) -> Tensor:
        plain = SamplingParams.make(request.sampling, engine_kwargs={})
        return super().reshaped(logits, prompt, answer, replace(request, sampling=plain))


class AlwaysTheSame(Modest):
    """Without seeds, every call samples from a generator in the same state."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        seeds = torch.arange(len(request.prompts)) if request.seeds is None else request.seeds
        return super().generate(replace(request, seeds=seeds))


class EmptyPromptFails(ToyBackend):
    """It declares that a prompt may be empty, and fails for such a prompt."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, empty_prompt=True)


class LogitsReused(ToyBackend):
    """The logits of every call are written into the same memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.buffer = torch.zeros(1_000_000)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        batch = super().score_logprobs(request)
        if batch.logits is None:
            return batch
        values = self.buffer[: batch.logits.values.numel()].view_as(batch.logits.values).copy_(batch.logits.values)
        return replace(batch, logits=batch.logits.with_values(values))


class AbortEndsTheCall(Abortable):
    """Aborting one request ends all requests of the same call."""

    def ended(self, request_ids: tuple[str, ...]) -> list[bool]:
        return [any(super().ended(request_ids))] * len(request_ids)


class FirstLogProbZeroed(ToyBackend):
    """The log-prob of the first token is 0.0, as if the logits of the prefill were lost."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(request)
        if batch.logprobs is None:
            return batch
        values = batch.logprobs.values.masked_fill(batch.ids.positions == 0, 0.0)
        return replace(batch, logprobs=Ragged(values, batch.ids.lengths))


class PadsCounted(ToyBackend):
    """Prompts are padded on the right, and the answer continues after the pads."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        padded = request.prompts.to_padded(self.tokenizer.pad_token_id)
        return super().generate(replace(request, prompts=Ragged.from_list(list(padded))))


class ProcessedCalledRaw(ToyBackend):
    """Log-probs of the sampled distribution are labelled as the model's own."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(replace(request, logprobs="processed"))
        return batch if request.logprobs == "processed" else replace(batch, mode="raw", temperature=1.0, support="full")


class SeedIgnored(ToyBackend):
    """Every call samples from one generator and ignores the seeds."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return super().generate(replace(request, seeds=None))


class SeedOfTheCall(ToyBackend):
    """All rows of a call use the seed of the first row, so answers depend on which row is first."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return super().generate(replace(request, seeds=request.seeds[:1].expand(len(request.seeds))))


class RowsSwapped(ToyBackend):
    """Rows are sorted by length for speed and not put back."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        order = request.prompts.lengths.argsort(stable=True, descending=True)
        return super().generate(replace(request, prompts=request.prompts.select(order), seeds=request.seeds[order]))


class ScoresSwapped(ToyBackend):
    """Scores of rows of equal length are swapped; all shapes are right."""

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        batch = super().score_logprobs(request)
        order = torch.arange(len(batch.logprobs))
        for length in set(batch.logprobs.lengths.tolist()):
            rows = (batch.logprobs.lengths == length).nonzero().flatten()
            order[rows] = rows.flip(0)
        return replace(batch, logprobs=batch.logprobs.select(order))


class SecondMostProbable(ToyBackend):
    """The argmax is the second most probable id, except where an id has most of the probability."""

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        batch = super().score_logprobs(request)
        if batch.argmax is None:
            return batch
        logits = self.model(request.sequences.values.roll(1)).log_softmax(-1)
        top = logits.topk(2)
        wrong = torch.where(top.values[:, 0] > -0.6, top.indices[:, 0], top.indices[:, 1])
        return replace(batch, argmax=batch.argmax.with_values(torch.where(batch.scored.values, wrong, -1)))


class EosAlwaysEnds(ToyBackend):
    """`ignore_eos` is not passed on."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return super().generate(replace(request, stop_ids=request.stop_ids | {self.tokenizer.eos_token_id}))


class FieldMissing(ToyBackend):
    """The plugin's own containers lack one of the masks."""

    @hookimpl(wrapper=True)
    def to_containers(self, request: ContainerRequest) -> Generator[None, TensorDict, TensorDict]:
        made = yield
        return made.exclude(("masks", "all_response_mask"))


class StopStringIgnored(ToyBackend):
    """Stop strings are declared and ignored."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return super().generate(replace(request, sampling=SamplingParams.make(request.sampling, stop=())))


class TopKIgnored(ToyBackend):
    """top_k is declared and ignored."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(replace(request, sampling=SamplingParams.make(request.sampling, top_k=None)))
        return replace(
            batch, support="truncated" if request.sampling.truncates_support and batch.mode != "raw" else "full"
        )


class PenaltyIgnored(ToyBackend):
    """presence_penalty is declared, but the engine does not support it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        sampling = {**self.capabilities.sampling, "presence_penalty": None}
        self.capabilities = replace(self.capabilities, sampling=sampling)


class TemperatureIgnoredWhileScoring(ToyBackend):
    """Scores are computed at temperature 1 but labelled with the requested temperature."""

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        batch = super().score_logprobs(replace(request, temperature=1.0))
        return replace(
            batch, mode="raw" if request.temperature == 1.0 else "processed", temperature=request.temperature
        )


class SupportUnsaid(ToyBackend):
    """Log-probs of a truncated distribution are labelled as those of the full one."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return replace(super().generate(request), support="full")


class OneRowFailsAll(ToyBackend):
    """It declares one token of context too many, so core passes on a row for which the engine fails the whole call."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, max_context=self.max_context + 1)

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        self._check(request.prompts.lengths + (request.sampling.max_new_tokens or 1))
        return super().generate(request)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        self._check(request.sequences.lengths)
        return super().score_logprobs(request)

    def _check(self, lengths: torch.Tensor) -> None:
        if bool((lengths > self.max_context).any()):
            raise RuntimeError(f"a row of {int(lengths.max())} does not fit {self.max_context}")


class StreamsNothing(ToyBackend):
    """It declares `streaming`, and hands nothing over before the end."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return super().generate(replace(request, on_tokens=None))


class StreamedRowsSwapped(ToyBackend):
    """The tokens of a row are handed over as those of another row."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        tell, last = request.on_tokens, len(request.prompts) - 1
        if tell is not None:
            request = replace(request, on_tokens=lambda chunk: tell(replace(chunk, row=last - chunk.row)))
        return super().generate(request)


class OldWeights(ToyBackend):
    """New weights are accepted but not loaded."""

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        return True


class OwnerUnheard(ToyBackend):
    """It takes every update for one with weights, as plugins did before owners could say that theirs had changed."""

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        if request.by_owner:
            raise AttributeError("'NoneType' object has no attribute 'items'")
        return super().update_weights(request)
