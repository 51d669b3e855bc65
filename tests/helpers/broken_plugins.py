"""Plugins with one realistic defect each, which the conformance kit must find.

`Abortable`, `Scaled`, `Reshaping` and `Modest` have no defect: they add capabilities that the toy backend lacks.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from toy_backend import ToyBackend

from corelm import Ragged, SamplingParams, hookimpl
from corelm.spec.records import (
    AbortRequest,
    ContainerRequest,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    WeightUpdate,
)
from corelm.support import RowAnswer


def _sliced(rows: Ragged | None, start: torch.Tensor, stop: torch.Tensor) -> Ragged | None:
    return None if rows is None else rows.slice(start, stop)


class Abortable(ToyBackend):
    """No defect: it takes concurrent calls and can be aborted. Long answers wait for the abort and end half-way."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, abort=True, concurrent_calls=True)
        self.aborted: set[str] = set()
        self.heard = threading.Event()

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(request)
        if (request.sampling.max_new_tokens or 0) > 200:
            self.heard.wait(timeout=5)
        ended = self.ended(request.request_ids)
        start, stop = batch.ids.lengths * 0, torch.where(torch.tensor(ended), batch.ids.lengths // 2, batch.ids.lengths)
        reasons = ["abort" if end else reason for end, reason in zip(ended, batch.finish_reasons, strict=True)]
        return replace(
            batch,
            ids=batch.ids.slice(start, stop),
            logprobs=_sliced(batch.logprobs, start, stop),
            finish_reasons=tuple(reasons),
        )

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        self.aborted.update(request.request_ids)
        self.heard.set()
        return True

    def ended(self, request_ids: tuple[str, ...]) -> list[bool]:
        return [name in self.aborted for name in request_ids]


class Scaled(ToyBackend):
    """No defect: its log-probs are scaled, so they depend on the temperature and on no other parameter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, generation_modes=frozenset({"scaled"}))


class CutThoughScaled(Scaled):
    """Its scaled log-probs depend on the truncation too."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(replace(request, logprobs="processed"))
        return batch if request.logprobs == "processed" else replace(batch, mode="raw", temperature=1.0, support="full")


class Reshaping(ToyBackend):
    """No defect: it has penalties, and a `logit_bias` in engine_kwargs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        more = dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty", "engine_kwargs"))
        self.capabilities = replace(self.capabilities, sampling={**self.capabilities.sampling, **more})

    def _distributions(
        self, logits: Tensor, prompt: list[int], answer: list[int], request: GenerateRequest
    ) -> tuple[Tensor, Tensor]:
        reshaped = self.reshaped(logits, prompt, answer, request)
        sampled_from, processed = super()._distributions(
            reshaped, prompt, answer, replace(request, logprobs="processed")
        )
        return sampled_from, processed if request.logprobs == "processed" else logits.log_softmax(-1)

    def reshaped(self, logits: Tensor, prompt: list[int], answer: list[int], request: GenerateRequest) -> Tensor:
        """Return the logits after `logit_bias` and the penalties."""
        sampling, logits = request.sampling, logits.clone()
        for token, bias in sampling.engine_kwargs.get("logit_bias", {}).items():
            logits[int(token)] += bias
        seen = torch.tensor(sorted(self.penalised(prompt, answer)), dtype=torch.int64)
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=len(logits))
        return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)

    def penalised(self, prompt: list[int], answer: list[int]) -> set[int]:
        """Return the ids that the repetition penalty counts."""
        return {*prompt, *answer}


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


class Modest(ToyBackend):
    """No defect: its seeds are costly, and a prompt may be empty."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, seeds_are_costly=True, empty_prompt=True)

    def _answer(self, prompt: list[int], seed: int, request: GenerateRequest) -> RowAnswer:
        return super()._answer(prompt or [self.tokenizer.bos_token_id], seed, request)


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


class OldWeights(ToyBackend):
    """New weights are accepted but not loaded."""

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        return True


class NeverStops(ToyBackend):
    """Declares that it stops at a timeout, and works on to the end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, stops_at_timeout=True)


class RaisesAndGoesOn(NeverStops):
    """Declares that it stops at a timeout. It raises in time, but the next call waits for what is left of the work."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turn = threading.Lock()

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        answers: list[GenerateResult] = []

        def work() -> None:
            with self.turn:
                answers.append(ToyBackend.generate(self, request))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(request.timeout)
        if not answers:
            raise TimeoutError("too slow")
        return answers[0]
