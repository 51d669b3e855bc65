"""An engine without a model that stops in the middle of each answer, so that a test can update its weights there."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from corelm import hookimpl
from corelm.errors import EngineError
from corelm.spec import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult, WeightUpdate
from helpers.fakes import Fake

PATIENCE = 20.0
LONG = {"max_new_tokens": 6}


class Stepping(Fake):
    """Samples half of each answer, waits for `go_on`, and samples the rest with the weights that it has then."""

    def __init__(self, **capabilities: Any) -> None:
        super().__init__(**{"updates_in_flight": True, **capabilities})
        self.in_the_middle, self.go_on = threading.Event(), threading.Event()
        self.scoring, self.scored = threading.Event(), threading.Event()
        self.scored.set()
        self.fails: Exception | None = None
        self.label: str | None = None
        self.report: Callable[[GenerateResult], GenerateResult] = lambda batch: batch

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        first, self.label = request.weight_version, request.weight_version
        self.in_the_middle.set()
        assert self.go_on.wait(PATIENCE)
        batch = super().generate(request)
        assert first is not None and self.label is not None
        runs = ((first, 0),) if self.label == first else ((first, 0), (self.label, 3))
        return self.report(replace(batch, version_runs=(runs,) * len(batch.ids)))

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        self.scoring.set()
        assert self.scored.wait(PATIENCE)
        return super().score_logprobs(request)

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        if self.fails is not None and not isinstance(self.fails, EngineError):
            raise self.fails
        self.label = request.version
        if self.fails is not None:
            raise self.fails
        return super().update_weights(request)
