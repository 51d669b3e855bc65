"""Plugins with adapters, with one realistic defect each, which the conformance kit must find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from corelm import hookimpl
from corelm.spec import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult, WeightUpdate
from corelm.spec.records import SleepRequest
from helpers.adapter_toys import AdapterToy
from helpers.capable_plugins import Sleeper


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


class MergedIntoBase(AdapterToy):
    """It adds an adapter to its base weights, which then have it in every call."""

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        done = super().update_weights(request)
        if request.adapter is not None and not request.unloads:
            self.model.table.data += self.added[request.adapter]
            self.added[request.adapter] = torch.zeros_like(self.added[request.adapter])
        return done


class AdaptersLostInSleep(AdapterToy, Sleeper):
    """Its base weights survive a sleep at level 1, and its adapters do not."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, sleep_levels=frozenset({1}))

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        self.added = {name: torch.zeros_like(added) for name, added in self.added.items()}
        return super().sleep(request)
