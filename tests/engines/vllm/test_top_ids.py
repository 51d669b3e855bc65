"""The most probable ids of answers and scores, held against the plain float32 forward of the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import corelm
from corelm import Backend, SamplingParams
from corelm.spec import GenerateResult
from engines.vllm.distributions import distributions
from engines.vllm.launch import VLLMServerProcess
from helpers.tiny_models import VOCAB, random_rows, tiny_model

PROMPTS = random_rows(9, 1, 4, seed=5)
ATOL = 5e-5


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerProcess]:
    """A server that returns processed log-probs, and no more than 30 candidates."""
    arguments = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "30")
    with VLLMServerProcess(tiny_folder, tmp_path_factory.mktemp("log") / "top.txt", *arguments) as running:
        yield running


@pytest.fixture(
    scope="module",
    params=["async-raw", "sync-processed", pytest.param("server-processed", marks=pytest.mark.nightly)],
)
def backend(request: pytest.FixtureRequest, open_vllm: Callable[..., Backend]) -> Iterator[Backend]:
    if request.param == "async-raw":
        yield request.getfixturevalue("shared")
    elif request.param == "sync-processed":
        with open_vllm(engine="sync", logprobs_mode="processed_logprobs") as opened:
            yield opened
    else:
        running = request.getfixturevalue("server")
        with corelm.get_backend("vllm", base_url=running.url, api_key=running.key) as opened:
            yield opened


def generate(backend: Backend, k: int, **sampling: Any) -> GenerateResult:
    (mode,) = backend.capabilities.generation_modes
    return backend.generate(
        PROMPTS,
        {"max_new_tokens": 6, "ignore_eos": True, **sampling},
        logprobs=mode,  # type: ignore[arg-type]
        seeds=list(range(len(PROMPTS))),
        top_logprobs=k,
    )


def check(ids: Tensor, found: Tensor, tail: Tensor, expected: Tensor) -> None:
    """Compare most probable ids with whole distributions, float64[positions, vocabulary], -inf for no probability."""
    k = ids.shape[1]
    best = expected.topk(k).values
    torch.testing.assert_close(found.double(), best, rtol=0, atol=ATOL)
    real = best > -torch.inf
    assert torch.equal(ids >= 0, real)
    # Of ids that rounding could swap, either may be named: what counts is that its own log-prob is right.
    named = expected.gather(1, ids.clamp_min(0))
    torch.testing.assert_close(named[real], found.double()[real], rtol=0, atol=ATOL)
    assert all(len({*row} - {-1}) == sum(token >= 0 for token in row) for row in ids.tolist())
    left = expected.exp().scatter(1, ids.clamp_min(0), 0.0).sum(1)
    torch.testing.assert_close(tail.double().exp(), left, rtol=0, atol=ATOL)
    assert bool((tail[(best == -torch.inf).any(1)] == -torch.inf).all())


@pytest.mark.parametrize("k", [1, 7, 30])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.5, "temperature": 1.5}, {"min_p": 0.2}],
    ids=["plain", "cold", "greedy", "top-k", "top-p", "min-p"],
)
def test_answers_come_with_their_most_probable_ids(backend: Backend, sampling: dict[str, Any], k: int) -> None:
    result = generate(backend, k, **sampling)
    answers = result.ids.tolist()
    model = tiny_model(hidden_size=128)
    rows = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    given = SamplingParams(**sampling) if result.mode == "processed" else SamplingParams()
    whole = torch.cat(
        [distributions(model, row, given)[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]
    )
    assert result.top_ids is not None and result.top_logprobs is not None and result.tail_log_mass is not None
    check(result.top_ids.values, result.top_logprobs.values, result.tail_log_mass.values, whole)


@pytest.mark.parametrize("k", [1, 30])
def test_scores_come_with_the_most_probable_ids(backend: Backend, k: int) -> None:
    model, starts = tiny_model(hidden_size=128), [3, 1, 2]
    result = backend.score_logprobs(PROMPTS, score_from=starts, return_argmax=True, top_k=k)
    assert result.top_ids is not None and result.top_logprobs is not None and result.tail_log_mass is not None
    assert result.argmax is not None
    marks = [[place >= start for place in range(len(row))] for row, start in zip(PROMPTS, starts, strict=True)]
    assert result.scored.tolist() == marks
    scored = result.scored.values
    whole = torch.cat([distributions(model, row, SamplingParams()) for row in PROMPTS])
    check(
        result.top_ids.values[scored],
        result.top_logprobs.values[scored],
        result.tail_log_mass.values[scored],
        whole[scored],
    )
    assert torch.equal(result.argmax.values[scored], result.top_ids.values[scored, 0])
    assert bool((result.top_ids.values[~scored] == -1).all()) and not result.top_logprobs.values[~scored].any()
    own = whole.gather(1, torch.tensor([token for row in PROMPTS for token in row]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(result.logprobs.values[scored].double(), own[scored], rtol=0, atol=ATOL)


def test_the_limit_of_the_engine_is_declared(backend: Backend, request: pytest.FixtureRequest) -> None:
    server = "server" in request.node.name
    # The vocabulary is smaller than the limit of an engine that the plugin opens.
    expected = 30 if server else VOCAB
    assert (backend.capabilities.top_logprobs, backend.capabilities.score_top_k) == (expected, expected)


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
