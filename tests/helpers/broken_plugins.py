"""Plugins with one realistic defect each, which the conformance kit must find.

`Abortable` and `Scaled` have no defect: they add capabilities that the toy backend lacks.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
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


class EosDropped(ToyBackend):
    """The EOS that ended an answer is left out, unless it is the only token."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(request)
        eos = request.stop_ids & {self.tokenizer.eos_token_id}
        dropped = torch.tensor([len(row) > 1 and row[-1] in eos for row in batch.ids.tolist()])
        start, stop = batch.ids.lengths * 0, batch.ids.lengths - dropped.long()
        return replace(batch, ids=batch.ids.slice(start, stop), logprobs=_sliced(batch.logprobs, start, stop))


class EosAlwaysEnds(ToyBackend):
    """`ignore_eos` is not passed on."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return super().generate(replace(request, stop_ids=request.stop_ids | {self.tokenizer.eos_token_id}))


class EveryEndIsAStop(ToyBackend):
    """The finish reason is a constant."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        batch = super().generate(request)
        return replace(batch, finish_reasons=("stop",) * len(batch.ids))


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
