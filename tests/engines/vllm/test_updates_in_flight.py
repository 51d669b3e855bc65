"""New weights in the middle of answers: each token has the log-prob of the weights that its row says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from corelm import Backend
from corelm.backend.arguments import prepare_generation
from corelm.errors import InvalidRequestError
from corelm.spec import GenerateResult, TokenChunk
from helpers import oracle
from helpers.tiny_models import random_rows, tiny_model

Open = Callable[..., Backend]
PROMPTS = random_rows(7, 12, 3, seed=2)
LONG = {"max_new_tokens": 300, "ignore_eos": True, "seed": 3}
#: How many tokens row 0 has when the update begins. vLLM goes on until it pauses.
AT = 20
PATIENCE = 120.0


@pytest.fixture(scope="module")
def backend(open_vllm: Open) -> Iterator[Backend]:
    with open_vllm() as opened:
        yield opened


def answers_with_an_update(backend: Backend, seed: int, version: str, sampling: Any = LONG) -> GenerateResult:
    """Return answers in the middle of which the weights of ``tiny_model(seed=seed)`` were loaded."""
    seen = 0
    raised: list[BaseException] = []

    def update() -> None:
        try:
            backend.update_weights(tiny_model(hidden_size=128, seed=seed).state_dict(), version, when="now")
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=update)

    def listen(chunk: TokenChunk) -> None:
        nonlocal seen
        before, seen = seen, seen + len(chunk.ids) * (chunk.row == 0)
        if before < AT <= seen:
            thread.start()

    made = backend.run(prepare_generation(backend.engine, PROMPTS, sampling, on_tokens=listen))
    thread.join(PATIENCE)
    assert not thread.is_alive() and not raised
    return made


def test_each_token_has_the_log_prob_of_its_own_weights(backend: Backend) -> None:
    assert backend.capabilities.updates_in_flight
    versions = [(backend.weight_version, 0)]
    for seed in (1, 0, 1):
        version = f"of seed {seed}, number {len(versions)}"
        made = answers_with_an_update(backend, seed, version)
        assert made.finish_reasons == ("length",) * 3 and made.version_runs is not None and made.logprobs is not None
        (old, _), new_model = versions[-1], tiny_model(hidden_size=128, seed=seed)
        old_model = tiny_model(hidden_size=128, seed=1 - seed)
        assert made.weight_versions == (old,) * 3
        for prompt, answer, runs, found in zip(
            PROMPTS, made.ids.tolist(), made.version_runs, made.logprobs.split(), strict=True
        ):
            (first, zero), (second, switch) = runs
            assert (first, zero, second) == (old, 0, version) and AT <= switch < LONG["max_new_tokens"]
            # vLLM reads what it has sampled so far again with the new weights.
            before = oracle.answer_logprobs(old_model, prompt, answer)[:switch]
            after = oracle.answer_logprobs(new_model, prompt, answer)[switch:]
            torch.testing.assert_close(found, torch.cat([before, after]), rtol=0, atol=1e-4)
            # A switch that is one token off would be seen.
            assert float((oracle.answer_logprobs(new_model, prompt, answer)[:switch] - before).abs().max()) > 0.5
        versions.append((version, seed))
        # The next call is of the new weights alone, and finds nothing of the old ones in a cache.
        later = backend.generate(PROMPTS, {"max_new_tokens": 4, "seed": 1})
        assert later.version_runs is None and later.weight_versions == (version,) * 3
        expected = [
            oracle.answer_logprobs(new_model, prompt, answer)
            for prompt, answer in zip(PROMPTS, later.ids.tolist(), strict=True)
        ]
        assert later.logprobs is not None
        torch.testing.assert_close(later.logprobs.values, torch.cat(expected), rtol=0, atol=1e-4)


def test_answers_go_on_if_the_new_weights_are_refused(backend: Backend) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        state = list(tiny_model(hidden_size=128, seed=1).state_dict().items())
        yield from state[: len(state) // 2]
        raise OSError("the trainer is gone")

    before, begun = backend.weight_version, threading.Event()
    prepared = prepare_generation(backend.engine, PROMPTS, LONG, on_tokens=lambda chunk: begun.set())
    answer = backend.submit(prepared, block=True)
    assert begun.wait(PATIENCE)
    with pytest.raises(InvalidRequestError, match=r"the iterator failed after .* the trainer is gone"):
        backend.update_weights(weights(), "new", when="now")
    made, expected = answer.result(PATIENCE), backend.generate(PROMPTS, LONG)
    assert made.version_runs is None and made.weight_versions == (before,) * 3
    assert made.ids.tolist() == expected.ids.tolist()
    assert made.logprobs is not None and expected.logprobs is not None
    torch.testing.assert_close(made.logprobs.values, expected.logprobs.values, rtol=0, atol=1e-4)


def test_a_synchronous_engine_and_a_server_do_not_declare_it(open_vllm: Open) -> None:
    with open_vllm(engine="sync") as opened:
        assert not opened.capabilities.updates_in_flight
