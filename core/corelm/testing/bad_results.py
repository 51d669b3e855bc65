"""Core's checks stand between this engine and its user: a result that breaks the specification never comes through.

A wrapper plugin bends what the engine gives. The engine is the shared one, behind a backend that hands requests on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
import torch

from corelm import Backend, Ragged, hookimpl
from corelm.errors import EngineError
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm.testing.base import ConformanceBase, needs


class HandedOn:
    """An engine made of an opened backend: the same model and tokenizer under a façade of its own."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.capabilities = replace(backend.capabilities, native_samples=False)
        self.tokenizer = backend.tokenizer

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return self.backend.generate(
            request.prompts, request.sampling, logprobs=request.logprobs, seeds=request.seeds, timeout=request.timeout
        )

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        return self.backend.score_logprobs(
            request.sequences, temperature=request.temperature, score_from=request.score_from
        )


class Bend:
    """Changes every result of the two hooks with `bend`, once it is told to."""

    def __init__(self, bend: Callable[[Any], Any]) -> None:
        self.bend = bend
        self.on = True

    @hookimpl(wrapper=True)
    def generate(self, request: GenerateRequest) -> Generator[None, Any, Any]:
        result = yield
        return self.bend(result) if self.on else result

    @hookimpl(wrapper=True)
    def score_logprobs(self, request: ScoreRequest) -> Generator[None, Any, Any]:
        result = yield
        return self.bend(result) if self.on else result


def explode(batch: Any) -> Any:
    raise ZeroDivisionError("inside the hook")


def shorter(rows: Ragged) -> Ragged:
    """The last row loses its last value."""
    return Ragged(rows.values[:-1], torch.cat([rows.lengths[:-1], rows.lengths[-1:] - 1]))


def filled(rows: Ragged, value: float) -> Ragged:
    """The last value of the last row is `value`."""
    values = rows.values.clone()
    values[-1] = value
    return Ragged(values, rows.lengths)


def inferred(rows: Ragged) -> Ragged:
    with torch.inference_mode():
        return Ragged(rows.values.clone(), rows.lengths)


#: name → how a good batch is bent, and what the error has to say.
GENERATION: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an-exception": (explode, "ZeroDivisionError: inside the hook"),
    "none": (lambda b: None, "None"),
    "too-few-rows": (lambda b: replace(b, ids=b.ids.select([0])), "1 rows for 2"),
    "too-few-reasons": (lambda b: replace(b, finish_reasons=b.finish_reasons[:1]), "1 finish reasons for 2"),
    "an-unknown-reason": (lambda b: replace(b, finish_reasons=("stop", "tired")), "row 1: .*'tired'"),
    "lengths-that-differ": (lambda b: replace(b, logprobs=shorter(b.logprobs)), "differ in length"),
    "nan": (lambda b: replace(b, logprobs=filled(b.logprobs, float("nan"))), "row 1, position .* nan"),
    "minus-infinity": (lambda b: replace(b, logprobs=filled(b.logprobs, -float("inf"))), "row 1, position .* -inf"),
    "no-logprobs": (lambda b: replace(b, logprobs=None), "no log-probs"),
    "another-mode": (lambda b: replace(b, mode="processed" if b.mode == "raw" else "raw"), "were asked for"),
    "an-id-too-large": (lambda b: replace(b, ids=filled(b.ids, 2**40)), "outside the vocabulary"),
    "more-than-asked": (
        lambda b: replace(b, ids=b.ids.join(b.ids), logprobs=b.logprobs.join(b.logprobs)),
        "max_new_tokens",
    ),
    "half-precision": (lambda b: replace(b, logprobs=Ragged(b.logprobs.values.half(), b.ids.lengths)), "float16"),
    "inference-tensors": (lambda b: replace(b, logprobs=inferred(b.logprobs)), "inference tensor"),
    "too-few-labels": (lambda b: replace(b, weight_versions=("0",)), "1 weight_versions for 2"),
}
SCORES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an-exception": (explode, "ZeroDivisionError: inside the hook"),
    "none": (lambda b: None, "None"),
    "too-few-rows": (lambda b: replace(b, logprobs=b.logprobs.select([0])), "differ in length"),
    "lengths-that-differ": (lambda b: replace(b, scored=shorter(b.scored)), "differ in length"),
    "nan": (lambda b: replace(b, logprobs=filled(b.logprobs, float("nan"))), "row 1, position .* nan"),
    "a-gap": (
        lambda b: replace(b, logprobs=filled(b.logprobs, 0.0), scored=filled(b.scored, False)),
        "row 1: not every position",
    ),
    "a-first-position": (lambda b: replace(b, scored=Ragged.full(b.scored.lengths, True, torch.bool)), "position 0"),
    "another-temperature": (lambda b: replace(b, temperature=0.5), "temperature 0.5"),
    "inference-tensors": (lambda b: replace(b, logprobs=inferred(b.logprobs)), "inference tensor"),
}


class BadResultPromises(ConformanceBase):
    @needs("generation_modes")
    @pytest.mark.parametrize("defect", GENERATION)
    def test_a_bad_generation_never_reaches_its_user(self, backend: Backend, defect: str) -> None:
        bend, message = GENERATION[defect]
        wrapper = Bend(bend)
        bent = Backend.from_plugin(HandedOn(backend), "bent", wrappers=[wrapper])
        prompts = self.rows(backend, 4, 7)
        with pytest.raises(EngineError, match=f"hook generate: .*{message}") as caught:
            bent.generate(prompts, {"max_new_tokens": 3})
        assert isinstance(caught.value.__cause__, ZeroDivisionError) == (bend is explode)
        wrapper.on = False
        self.assert_true_answers(prompts, bent.generate(prompts, {"max_new_tokens": 3}))

    @needs("score")
    @pytest.mark.parametrize("defect", SCORES)
    def test_bad_scores_never_reach_their_user(self, backend: Backend, defect: str) -> None:
        bend, message = SCORES[defect]
        wrapper = Bend(bend)
        bent = Backend.from_plugin(HandedOn(backend), "bent", wrappers=[wrapper])
        rows = self.rows(backend, 4, 7)
        with pytest.raises(EngineError, match=f"hook score_logprobs: .*{message}") as caught:
            bent.score_logprobs(rows)
        assert isinstance(caught.value.__cause__, ZeroDivisionError) == (bend is explode)
        wrapper.on = False
        self.assert_true_scores(rows, bent.score_logprobs(rows))
