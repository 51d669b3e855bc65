"""Plugins without a defect that declare what the toy backend lacks."""

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corelm import Ragged, hookimpl
from corelm.spec import RowAnswer
from corelm.spec.records import AbortRequest, GenerateRequest, GenerateResult, SleepRequest, WakeRequest
from corelm_testing.toy import ToyBackend


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


class Modest(ToyBackend):
    """No defect: its seeds are costly, and a prompt may be empty."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, seeds_are_costly=True, empty_prompt=True)

    def _answer(self, row: int, prompt: list[int], seed: int, request: GenerateRequest) -> RowAnswer:
        return super()._answer(row, prompt or [self.tokenizer.bos_token_id], seed, request)


class Sleeper(ToyBackend):
    """No defect: it sleeps. Its table is moved aside at level 1, and dropped at level 2."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, sleep_levels=frozenset({1, 2}))
        self.kept: Tensor | None = None

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        self.kept = self.model.table.detach().clone() if request.level == 1 else None
        self.model.table.data = torch.full_like(self.model.table, torch.nan)
        return True

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        if "weights" in request.tags and self.kept is not None:
            self.model.table.data, self.kept = self.kept, None
        return True
