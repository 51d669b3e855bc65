"""Plugins with one realistic defect each, which the conformance kit must find.

Those without a defect, of which some inherit, are in `capable_plugins`.
"""

import math
from collections.abc import Generator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from corelm import Ragged, SamplingParams, hookimpl
from corelm.spec import RowAnswer, generate_result
from corelm.spec.records import (
    ContainerRequest,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightUpdate,
)
from corelm_testing.toy import ToyBackend
from helpers.adapter_toys import AdapterToy
from helpers.capable_plugins import Abortable, Modest, Reshaping, Scaled, Sleeper
from helpers.in_flight_toys import InFlight as InFlight
from helpers.in_flight_toys import RunsTooEarly as RunsTooEarly
from helpers.in_flight_toys import RunsTooLate as RunsTooLate
from helpers.in_flight_toys import UpdateUnsaid as UpdateUnsaid


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


class FirstIdUnpenalised(Reshaping):
    """The repetition penalty leaves out the first id of the prompt, as if it were a BOS."""

    def penalised(self, prompt: list[int], answer: list[int]) -> set[int]:
        return {*prompt[1:], *answer}


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


# Kept ids and the most probable ids ---------------------------------------------------------------------------------


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


# Adapters -----------------------------------------------------------------------------------------------------------


class AdapterIgnoredWhileScoring(AdapterToy):
    """Answers are of the adapter, and scores of the base weights."""

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        return super().score_logprobs(replace(request, adapter=None))


class AdapterStaysOn(AdapterToy):
    """A call without an adapter runs with that of the last call that had one."""

    last: Any = None

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return super().generate(self._kept_on(request))

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        return super().score_logprobs(self._kept_on(request))

    def _kept_on(self, request: Any) -> Any:
        if request.adapter:
            self.last = request.adapter
            return request
        return replace(request, adapter=self.last if self.last in self.added else None)


class FirstVersionKept(AdapterToy):
    """An adapter that is loaded again keeps its first weights."""

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        before = self.added.get(request.adapter or "")
        done = super().update_weights(request)
        if before is not None and not request.unloads:
            self.added[request.adapter or ""] = before
        return done


class DroppedBeforeRefused(AdapterToy):
    """It drops the old adapter before it looks whether the new one fits."""

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        if request.adapter in self.added and not request.unloads:
            self.added[request.adapter] = torch.zeros_like(self.added[request.adapter])
        return super().update_weights(request)


class UnknownIsBase(AdapterToy):
    """It answers with its base weights if there is no such adapter."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return super().generate(replace(request, adapter=request.adapter if request.adapter in self.added else None))

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        return super().score_logprobs(
            replace(request, adapter=request.adapter if request.adapter in self.added else None)
        )


class AdaptersLostInSleep(AdapterToy, Sleeper):
    """Its base weights survive a sleep at level 1, and its adapters do not."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, sleep_levels=frozenset({1}))

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        self.added = {name: torch.zeros_like(added) for name, added in self.added.items()}
        return super().sleep(request)


# Sleep --------------------------------------------------------------------------------------------------------------


class WeightsLostInSleep(Sleeper):
    """It wakes with other weights than it fell asleep with."""

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        if self.kept is not None:
            self.kept = self.kept.flip(0)
        return super().wake(request)


class WakesAsBefore(Sleeper):
    """Waking the cache brings back the weights that it fell asleep with, whatever was loaded since then."""

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        self.before = self.model.table.detach().clone()
        return super().sleep(request)

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        super().wake(request)
        if request.last:
            self.model.table.data = self.before
        return True


# Timeouts -----------------------------------------------------------------------------------------------------------


class NeverStops(ToyBackend):
    """Declares that it stops at a timeout, and works on to the end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, stops_at_timeout=True)


# Truncation in another order ----------------------------------------------------------------------------------------


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


# Beam search --------------------------------------------------------------------------------------------------------


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
