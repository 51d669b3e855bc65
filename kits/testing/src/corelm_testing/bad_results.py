"""Core checks every result of the engine: a result that breaks the specification raises an error.

A hook wrapper changes the results. The engine is the backend that all tests share, behind a plugin that forwards
requests to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
import torch

from corelm import Backend, Ragged, hookimpl
from corelm.errors import EngineError
from corelm.spec import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm_testing.base import ConformanceBase, needs
from corelm_testing.reference import seeded

#: What has hooks that `ForwardingPlugin` lacks.
NOT_FORWARDED: dict[str, Any] = {
    **dict.fromkeys(("abort", "adapters", "update_weights", "weight_stream", "updates_in_flight"), False),
    "sleep_levels": frozenset(),
    "without_weights": False,
}


class ForwardingPlugin:
    """A plugin that samples from and scores with an opened backend, and has the same model and tokenizer."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.capabilities = replace(backend.capabilities, **NOT_FORWARDED)
        self.tokenizer = backend.tokenizer

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return self.backend.generate(
            request.prompts, request.sampling, logprobs=request.logprobs, seeds=request.seeds, timeout=request.timeout
        )

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        return self.backend.score_logprobs(
            request.sequences,
            temperature=request.temperature,
            score_from=request.score_from,
            return_argmax=request.return_argmax,
        )


class ResultChanger:
    """A hook wrapper that passes every result of the two hooks through `change` while `on` is True."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change
        self.on = True

    @hookimpl(wrapper=True)
    def generate(self, request: GenerateRequest) -> Generator[None, Any, Any]:
        result = yield
        return self.change(result) if self.on else result

    @hookimpl(wrapper=True)
    def score_logprobs(self, request: ScoreRequest) -> Generator[None, Any, Any]:
        result = yield
        return self.change(result) if self.on else result


def explode(batch: Any) -> Any:
    raise ZeroDivisionError("inside the hook")


def shorter(rows: Ragged) -> Ragged:
    """Return the rows without the last value of the last row."""
    return Ragged(rows.values[:-1], torch.cat([rows.lengths[:-1], rows.lengths[-1:] - 1]))


def filled(rows: Ragged, value: float) -> Ragged:
    """Return the rows with `value` as the last value of the last row."""
    values = rows.values.clone()
    values[-1] = value
    return Ragged(values, rows.lengths)


def with_graph(rows: Ragged) -> Ragged:
    """Return the rows with values that depend on a parameter."""
    return rows.with_values(rows.values * torch.ones((), device=rows.values.device, requires_grad=True))


def with_modified_lengths(rows: Ragged) -> Ragged:
    """Return rows whose lengths were modified after they were made."""
    made = rows.clone()
    made.lengths[-1] += 1
    return made


def inference_mode_copy(rows: Ragged) -> Ragged:
    """Return a copy whose values are inference tensors."""
    with torch.inference_mode():
        return Ragged(rows.values.clone(), rows.lengths)


#: Name of the defect → how it changes a good result, and a pattern that the error message must match.
GENERATION: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an-exception": (explode, "ZeroDivisionError: inside the hook"),
    "none": (lambda b: None, "None"),
    "too-few-rows": (lambda b: replace(b, ids=b.ids.select([0])), "1 rows for 2"),
    "too-few-reasons": (lambda b: replace(b, finish_reasons=b.finish_reasons[:1]), "1 finish_reasons for 2"),
    "an-unknown-reason": (lambda b: replace(b, finish_reasons=(b.finish_reasons[0], "tired")), "row 1: .*'tired'"),
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
    "inference-tensors": (lambda b: replace(b, logprobs=inference_mode_copy(b.logprobs)), "inference tensor"),
    "too-few-labels": (lambda b: replace(b, weight_versions=("0",)), "1 weight_versions for 2"),
    "a-label-of-another-type": (
        lambda b: replace(b, weight_versions=("0", None)),
        "row 1: weight_versions: .*NoneType",
    ),
    # The answers in question have `ignore_eos`, so nothing stops them.
    "a-stop-that-nothing-caused": (lambda b: replace(b, finish_reasons=("length", "stop")), "row 1: .*'stop', but"),
    "a-length-that-came-early": (
        lambda b: replace(b, ids=shorter(b.ids), logprobs=shorter(b.logprobs)),
        "row 1: .*'length' after 2 tokens",
    ),
    "a-graph": (lambda b: replace(b, logprobs=with_graph(b.logprobs)), "logprobs carries a graph"),
    "no-values": (lambda b: replace(b, ids=b.ids.to("meta")), "ids is a tensor on the meta device"),
    "lengths-that-were-modified": (lambda b: replace(b, ids=with_modified_lengths(b.ids)), "ids: lengths add up to"),
}
SCORES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an-exception": (explode, "ZeroDivisionError: inside the hook"),
    "none": (lambda b: None, "None"),
    "too-few-rows": (lambda b: replace(b, logprobs=b.logprobs.select([0])), "differ in length"),
    "lengths-that-differ": (lambda b: replace(b, scored=shorter(b.scored)), "differ in length"),
    "nan": (lambda b: replace(b, logprobs=filled(b.logprobs, float("nan"))), "row 1, position .* nan"),
    "a-gap": (
        lambda b: replace(b, logprobs=filled(b.logprobs, 0.0), scored=filled(b.scored, False)),
        "row 1, position .*not every position",
    ),
    "a-first-position": (lambda b: replace(b, scored=Ragged.full(b.scored.lengths, True, torch.bool)), "position 0"),
    "another-temperature": (lambda b: replace(b, temperature=0.5), "temperature 0.5"),
    "inference-tensors": (lambda b: replace(b, logprobs=inference_mode_copy(b.logprobs)), "inference tensor"),
    "a-graph": (lambda b: replace(b, logprobs=with_graph(b.logprobs)), "logprobs carries a graph"),
    "no-values": (lambda b: replace(b, scored=b.scored.to("meta")), "scored is a tensor on the meta device"),
}


class BadResultPromises(ConformanceBase):
    @needs("generation_modes")
    @pytest.mark.parametrize("defect", GENERATION)
    def test_a_bad_generation_never_reaches_the_caller(self, backend: Backend, defect: str) -> None:
        change, message = GENERATION[defect]
        wrapper = ResultChanger(change)
        changed = Backend.from_plugin(ForwardingPlugin(backend), "changed", wrappers=[wrapper])
        prompts, sampling = self.rows(backend, 4, 7), seeded(backend, {"max_new_tokens": 3, "ignore_eos": True})
        with pytest.raises(EngineError, match=f"hook generate: .*{message}") as caught:
            changed.generate(prompts, sampling)
        assert isinstance(caught.value.__cause__, ZeroDivisionError) == (change is explode)
        wrapper.on = False
        self.assert_true_answers(prompts, changed.generate(prompts, sampling))

    @needs("score")
    @pytest.mark.parametrize("defect", SCORES)
    def test_bad_scores_never_reach_the_caller(self, backend: Backend, defect: str) -> None:
        change, message = SCORES[defect]
        wrapper = ResultChanger(change)
        changed = Backend.from_plugin(ForwardingPlugin(backend), "changed", wrappers=[wrapper])
        rows = self.rows(backend, 4, 7)
        with pytest.raises(EngineError, match=f"hook score_logprobs: .*{message}") as caught:
            changed.score_logprobs(rows)
        assert isinstance(caught.value.__cause__, ZeroDivisionError) == (change is explode)
        wrapper.on = False
        self.assert_true_scores(rows, changed.score_logprobs(rows))
