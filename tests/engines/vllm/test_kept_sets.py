"""The ids that tokens were drawn from, held against enumeration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from corelm import Backend, SamplingParams
from engines.vllm.distributions import distributions
from helpers import oracle
from helpers.requests import generation
from helpers.tiny_models import random_rows, tiny_model

Open = Callable[..., Backend]
PROMPTS = random_rows(9, 1, 4, 30, seed=5)
ATOL = 1e-5

SAMPLINGS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.2, "temperature": 1.7},
    "top-k-cold": {"top_k": 20, "temperature": 0.5},
    "top-k-top-p-hot": {"top_k": 50, "top_p": 0.8, "temperature": 1.5},
    "one-id": {"top_k": 1},
    "top-k-min-p": {"top_k": 9, "min_p": 0.5},
    "top-p-near-1": {"top_p": 0.999},
}


@pytest.fixture(scope="module", params=["async-raw", "sync-processed"])
def backend(request: pytest.FixtureRequest, open_vllm: Open) -> Iterator[Backend]:
    engine, mode = request.param.split("-")
    with open_vllm(engine=engine, logprobs_mode=f"{mode}_logprobs", return_support=True) as opened:
        yield opened


def generate(backend: Backend, prompts: list[list[int]] = PROMPTS, return_support: bool = True, **values: Any) -> Any:
    (mode,) = backend.capabilities.generation_modes
    return backend.generate(
        prompts,
        {"max_new_tokens": 8, "ignore_eos": True, **values},
        logprobs=mode,  # type: ignore[arg-type]
        seeds=list(range(len(prompts))),
        return_support=return_support,
    )


def test_long_prompts_that_are_read_in_steps_have_one_set_a_token(open_vllm: Open) -> None:
    # Before the tests with `backend`, because a process can hold one synchronous engine.
    prompts = random_rows(300, 200, 5, seed=8)
    with open_vllm(
        engine="sync", return_support=True, enable_chunked_prefill=True, max_num_batched_tokens=64, max_model_len=512
    ) as small:
        # Without seeds, with which vLLM crashes here on a CPU; core always sends some.
        result = small.engine.plugin.generate(
            generation(prompts, max_new_tokens=5, top_k=4, timeout=60.0, return_support=True)
        )
    model = tiny_model(hidden_size=128)
    for prompt, answer, sets in zip(prompts, result.ids.tolist(), result.kept_ids.tolist(), strict=True):
        logits = oracle.next_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1]
        assert sets == [sorted(each.topk(4).indices.tolist()) for each in logits]


def test_only_an_engine_that_was_opened_for_it_declares_it(backend: Backend, shared: Backend) -> None:
    assert backend.capabilities.return_support and not shared.capabilities.return_support
    # The plugin's own code leaves greedy tokens alone.
    assert backend.capabilities.argmax


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_sets_are_those_that_truncation_leaves(backend: Backend, name: str) -> None:
    sampling, model = SAMPLINGS[name], tiny_model(hidden_size=128)
    result = generate(backend, **sampling)
    assert result.kept_ids.contains(result.ids.values).all()
    masses, found, drawn = (each.tolist() for each in (result.kept_log_mass, result.kept_ids, result.logprobs))
    temperature = sampling.get("temperature", 1.0)
    for prompt, answer, sets, mass, own in zip(PROMPTS, result.ids.tolist(), found, masses, drawn, strict=True):
        assert len(sets) == len(answer) == 8
        row = [*prompt, *answer]
        expected = distributions(model, row, SamplingParams(**sampling))[len(prompt) :]
        full = (oracle.next_logits(model, row)[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)
        for position, kept in enumerate(sets):
            assert kept == sorted({*kept})
            assert kept == (expected[position] > -torch.inf).nonzero().flatten().tolist()
            assert mass[position] == pytest.approx(float(full[position, kept].logsumexp(-1)), abs=ATOL)
            if result.mode == "processed":
                # A low temperature enlarges how far the two forwards round apart.
                atol = ATOL / min(1.0, temperature)
                assert own[position] == pytest.approx(float(expected[position, answer[position]]), abs=atol)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_answers_are_those_of_vllms_own_truncation(backend: Backend, name: str) -> None:
    ours, theirs = (generate(backend, return_support=given, **SAMPLINGS[name]) for given in (True, False))
    assert ours.ids.tolist() == theirs.ids.tolist() and theirs.kept_ids is None
    torch.testing.assert_close(ours.logprobs.values, theirs.logprobs.values, rtol=0, atol=ATOL)


def test_penalties_come_before_the_sets(backend: Backend) -> None:
    """With a penalty of 2, an id that occurred cannot be in a set of one id, unless it is far more probable."""
    model, sampling = tiny_model(hidden_size=128), {"top_k": 3, "presence_penalty": 2.0, "temperature": 0.9}
    result = generate(backend, **sampling)
    for prompt, answer, sets, masses in zip(
        PROMPTS, result.ids.tolist(), result.kept_ids.tolist(), result.kept_log_mass.tolist(), strict=True
    ):
        logits = oracle.next_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1].double()
        for position, kept in enumerate(sets):
            logits[position, list({*answer[:position]})] -= 2.0
            full = (logits[position] / 0.9).log_softmax(-1)
            assert kept == sorted(full.topk(3).indices.tolist())
            assert masses[position] == pytest.approx(float(full[kept].logsumexp(-1)), abs=ATOL)
