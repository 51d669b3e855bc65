"""Requests that share calls keep their own sets and ids, also when rows are skipped, fail, are aborted or time out."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from corelm import Backend, Ragged, hookimpl
from corelm.batching import DynamicBatcher, Limits
from corelm.errors import BackendTimeoutError
from corelm.spec import AbortRequest, GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm_testing.toy import Bigram, ToyBackend
from helpers.batching_fakes import LONG, wait_until
from helpers.each import each

CUT = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 4, "seed": 1, "ignore_eos": True}
ASKED: dict[str, Any] = {"logprobs": "processed", "return_support": True, "top_logprobs": 3}
NAMES = ("ids", "logprobs", "kept_ids", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass")
POISON = [250]


class GatedToy(ToyBackend):
    """A toy engine that waits for a test before each call, and fails a call with a poisoned prompt in it."""

    gate: threading.Event
    sizes: list[int]

    def _enter(self, rows: Ragged) -> None:
        self.sizes.append(len(rows))
        assert self.gate.wait(LONG)
        if POISON in rows.tolist():
            raise RuntimeError("poisoned")

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        self._enter(request.prompts)
        result: GenerateResult = ToyBackend.generate(self, request)
        return result

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        self._enter(request.sequences)
        result: ScoreResult = ToyBackend.score_logprobs(self, request)
        return result

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        return True


@contextmanager
def gated() -> Iterator[tuple[GatedToy, DynamicBatcher]]:
    """Yield an engine that has a call and waits, and the batcher in front of it, in which later requests queue."""
    engine = GatedToy.open(Bigram.of_talk())
    assert isinstance(engine, GatedToy)
    engine.capabilities = replace(engine.capabilities, abort=True)
    engine.gate, engine.sizes = threading.Event(), []
    with DynamicBatcher(Backend.from_plugin(engine, "gated"), Limits()) as batcher:
        try:
            batcher.submit_generate([[3]], {"max_new_tokens": 1})
            wait_until(lambda: engine.sizes == [1])
            yield engine, batcher
        finally:
            engine.gate.set()


@pytest.fixture(scope="module")
def alone() -> Iterator[Backend]:
    with Backend.from_plugin(ToyBackend.open(), "toy") as backend:
        yield backend


def lists(batch: Any, names: tuple[str, ...] = NAMES) -> list[Any]:
    return [getattr(batch, name).tolist() for name in names]


def test_skipped_rows_and_a_request_that_fails_leave_the_sets_of_others(alone: Backend) -> None:
    given = [[[72, 101], [9999], [108]], [POISON], [[90]], [[80], [81]]]
    with gated() as (engine, batcher):
        futures = [batcher.submit_generate(prompts, CUT, **ASKED, on_error="skip") for prompts in given]
        engine.gate.set()
        assert "poisoned" in str(futures[1].exception(LONG))
        for at in (0, 2, 3):
            expected = alone.generate(given[at], CUT, **ASKED, on_error="skip")
            assert lists(futures[at].result(LONG)) == lists(expected)
    # All were asked together first, and then in halves.
    assert engine.sizes[1] == 6


def test_a_request_whose_time_is_over_takes_no_ids_of_others_along(alone: Backend) -> None:
    with gated() as (engine, batcher):
        late = batcher.submit_generate([[70], [71]], CUT, **ASKED, timeout=0.05)
        others = [batcher.submit_generate([[n], [n + 1]], CUT, **ASKED, timeout=LONG) for n in (72, 80)]
        assert isinstance(late.exception(LONG), BackendTimeoutError)
        engine.gate.set()
        for n, future in zip((72, 80), others, strict=True):
            assert lists(future.result(LONG)) == lists(alone.generate([[n], [n + 1]], CUT, **ASKED))


OVER = [[[[2, 9], [3]], [[7], [6]]], [[[2], [3, 4, 5]], [[5, 8], [6, 1]]]]
NAMED = [torch.tensor([[[row, 7], [8, 9]]] * 2) for row in range(2)]


@each(
    "asked, fields",
    [
        ([{"support": one} for one in OVER], ("logprobs", "scored")),
        ([{"top_ids": [*one]} for one in NAMED], ("top_ids", "top_logprobs", "tail_log_mass")),
        ([{"top_k": 3}] * 2, ("top_ids", "top_logprobs", "tail_log_mass")),
    ],
)
def test_scores_over_different_ids_share_a_call_and_a_skipped_row_moves_none(
    alone: Backend, asked: list[dict[str, Any]], fields: tuple[str, ...]
) -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    with gated() as (engine, batcher):
        futures = [batcher.submit_score_logprobs(rows, **one, on_error="skip") for one in asked]
        engine.gate.set()
        for one, future in zip(asked, futures, strict=True):
            expected = alone.score_logprobs(rows, **one, on_error="skip")
            found = future.result(LONG)
            assert lists(found, fields) == lists(expected, fields) and found.errors == expected.errors
    assert engine.sizes[1:] == [4 - sum("support" in one for one in asked[:1])]


@each("samples", [None, 2])
def test_answers_aborted_in_the_queue_have_empty_sets(samples: int | None) -> None:
    with gated() as (_, batcher):
        sampling = {**CUT, "num_samples": samples}
        names = [f"mine-{row}" for row in range(2 * (samples or 1))]
        future = batcher.submit_generate([[72], [73]], sampling, **ASKED, request_ids=names)
        batcher.abort(names)
        found = future.result(LONG)
    assert found.finish_reasons == ("abort",) * len(names)
    assert lists(found) == [[[]] * len(names)] * len(NAMES)
