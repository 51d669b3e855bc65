"""The most probable ids at the limits of an engine. The kit compares those of answers and scores with the oracle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from corelm import Backend, SamplingParams
from corelm.spec import GenerateResult
from engines.vllm.distributions import distributions
from helpers.tiny_models import VOCAB, random_rows, tiny_model

PROMPTS = random_rows(9, 1, 4, seed=5)
ATOL = 5e-5


@pytest.fixture(scope="module", params=["async-raw", "sync-processed"])
def backend(request: pytest.FixtureRequest, open_vllm: Callable[..., Backend]) -> Iterator[Backend]:
    if request.param == "async-raw":
        yield request.getfixturevalue("shared")
    else:
        with open_vllm(engine="sync", logprobs_mode="processed_logprobs") as opened:
            yield opened


def test_the_limit_of_the_engine_is_declared(backend: Backend) -> None:
    # The vocabulary is smaller than the limit of an engine that the plugin opens.
    assert (backend.capabilities.top_logprobs, backend.capabilities.score_top_k) == (VOCAB, VOCAB)


def generate(backend: Backend, k: int, **sampling: Any) -> GenerateResult:
    (mode,) = backend.capabilities.generation_modes
    return backend.generate(
        PROMPTS,
        {"max_new_tokens": 6, "ignore_eos": True, **sampling},
        logprobs=mode,  # type: ignore[arg-type]
        seeds=list(range(len(PROMPTS))),
        top_logprobs=k,
    )


def test_a_row_as_long_as_the_context_comes_with_its_most_probable_ids(backend: Backend) -> None:
    limit = backend.capabilities.max_context
    assert limit is not None
    rows = [[7 + place % 5 for place in range(length)] for length in (limit, limit - 1)]
    result = backend.score_logprobs(rows, score_from=[limit - 3] * 2, top_k=3)
    assert result.errors is None and result.top_ids is not None and result.top_logprobs is not None
    for row, ids, logprobs in zip(rows, result.top_ids.tolist(), result.top_logprobs.tolist(), strict=True):
        whole = distributions(tiny_model(hidden_size=128), row, SamplingParams())[limit - 3 :]
        assert ids[limit - 3 :] == whole.topk(3).indices.tolist()
        torch.testing.assert_close(
            torch.tensor(logprobs[limit - 3 :]).double(), whole.topk(3).values, rtol=0, atol=ATOL
        )


def test_scores_do_not_take_the_most_probable_ids_from_answers_that_run_beside_them(shared: Backend) -> None:
    """vLLM's V1 runner returns no candidates in a step that has a request with `logprob_token_ids`."""
    over = threading.Event()

    def score() -> None:
        while not over.is_set():
            shared.score_logprobs([[5, 6, 7]])

    scorers = [threading.Thread(target=score) for _ in range(2)]
    for scorer in scorers:
        scorer.start()
    try:
        for _ in range(5):
            assert generate(shared, 5, max_new_tokens=40).errors is None
    finally:
        over.set()
        for scorer in scorers:
            scorer.join()
