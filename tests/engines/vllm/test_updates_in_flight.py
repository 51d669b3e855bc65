"""New weights in the middle of answers that vLLM refuses. The conformance kit shows those that it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from corelm import Backend
from corelm.backend.arguments import prepare_generation
from corelm.errors import InvalidRequestError
from helpers.tiny_models import random_rows, tiny_model

Open = Callable[..., Backend]
PROMPTS = random_rows(7, 12, 3, seed=2)
LONG = {"max_new_tokens": 300, "ignore_eos": True, "seed": 3}
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def backend(open_vllm: Open) -> Iterator[Backend]:
    with open_vllm() as opened:
        yield opened


def test_answers_go_on_if_the_new_weights_are_refused(backend: Backend) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        state = list(tiny_model(hidden_size=128, seed=1).state_dict().items())
        yield from state[: len(state) // 2]
        raise OSError("the trainer is gone")

    before, begun = backend.weight_version, threading.Event()
    prepared = prepare_generation(backend.engine, PROMPTS, LONG, on_tokens=lambda chunk: begun.set())
    answer = backend.submit(prepared, block=True)
    assert begun.wait(TIMEOUT)
    with pytest.raises(InvalidRequestError, match=r"the iterator failed after .* the trainer is gone"):
        backend.update_weights(weights(), "new", when="now")
    made, expected = answer.result(TIMEOUT), backend.generate(PROMPTS, LONG)
    assert made.version_runs is None and made.weight_versions == (before,) * 3
    assert made.ids.tolist() == expected.ids.tolist()
    assert made.logprobs is not None and expected.logprobs is not None
    torch.testing.assert_close(made.logprobs.values, expected.logprobs.values, rtol=0, atol=1e-4)


def test_a_synchronous_engine_and_a_server_do_not_declare_it(open_vllm: Open) -> None:
    with open_vllm(engine="sync") as opened:
        assert not opened.capabilities.updates_in_flight
