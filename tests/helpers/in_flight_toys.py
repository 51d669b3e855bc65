"""A toy engine whose weights may change in the middle of an answer, and what can be wrong with such an engine."""

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corelm import hookimpl
from corelm.spec import RowAnswer
from corelm.spec.records import GenerateRequest, GenerateResult, WeightUpdate
from corelm_engine_kit import RowVersions, VersionLog
from corelm_testing.toy import ToyBackend


class InFlight(ToyBackend):
    """No defect: an update comes between two tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, updates_in_flight=True)
        self.log, self.lock, self.row = VersionLog(), threading.Lock(), 0

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        self.versions = RowVersions(len(request.prompts), self.log.now(request))
        return replace(super().generate(request), version_runs=self.versions.runs)

    def _answer(self, row: int, prompt: list[int], seed: int, request: GenerateRequest) -> RowAnswer:
        self.row = row
        return super()._answer(row, prompt, seed, request)

    def _distributions(
        self, logits: Tensor, prompt: list[int], answer: list[int], request: GenerateRequest
    ) -> tuple[Tensor, Tensor]:
        with self.lock:
            # Again: the weights may have changed since they were computed. They are a view of the weights, which the
            # next update would change after the lock is released.
            logits = self.model(torch.tensor((prompt + answer)[-1])).clone()
            self.versions.sampled(self.row, self.first_of_run(len(answer)), self.log.now(request))
        return super()._distributions(logits, prompt, answer, request)

    def first_of_run(self, token: int) -> int:
        """Return where a run is said to begin that begins with this token."""
        return token

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        with self.lock:
            done = super().update_weights(request)
            self.log.note(request)
        return done


class RunsTooLate(InFlight):
    """The first token of the new weights is said to be of the old ones."""

    def first_of_run(self, token: int) -> int:
        return token + 1 if token else 0


class RunsTooEarly(InFlight):
    """The last two tokens of the old weights are said to be of the new ones."""

    def first_of_run(self, token: int) -> int:
        return token - 2 if token > 2 else token


class UpdateUnsaid(InFlight):
    """All tokens are said to be of the weights with which the call began."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        version = self.log.now(request)
        return replace(super().generate(request), version_runs=(((version, 0),),) * len(request.prompts))
