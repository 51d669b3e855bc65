"""A list of URLs is a fleet of servers."""

from __future__ import annotations

from typing import Any

import pytest

import corelm
from corelm.errors import InvalidRequestError
from helpers.fake_vllm import PROMPTS, SAMPLING, VOCAB, FakeVLLM
from helpers.http_server import FaultServer, Request, reset
from helpers.processes import wait_until
from helpers.tiny_models import tiny_tokenizer

OPTIONS: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "vocab_size": VOCAB, "max_retries": 0}


def posted(server: FaultServer) -> int:
    """Return how many completions of the tests' prompts a server was asked for."""
    return sum(request.method == "POST" and request.body.get("prompt") in PROMPTS for request in server.requests)


def test_two_servers_answer_as_one_also_if_one_fails_for_a_while() -> None:
    fakes = [FakeVLLM(), FakeVLLM()]
    with FaultServer(fakes[0]) as one, FaultServer(fakes[1]) as two:
        with corelm.get_backend("vllm", base_url=one.url, **OPTIONS) as single:
            expected = single.generate(PROMPTS, SAMPLING)
            scores = single.score_logprobs(PROMPTS)
        with corelm.get_backend("vllm", base_url=[one.url, two.url], **OPTIONS) as fleet:
            assert fleet.model_name == f"{one.url}, {two.url}"
            found = fleet.generate(PROMPTS, SAMPLING)
            assert found.ids.tolist() == expected.ids.tolist()
            assert fleet.score_logprobs(PROMPTS).logprobs.tolist() == scores.logprobs.tolist()
            assert posted(one) and posted(two)

            def fault(request: Request) -> Any:
                return reset()

            fakes[1].fault = fault
            assert fleet.generate(PROMPTS, SAMPLING).ids.tolist() == expected.ids.tolist()
            fakes[1].fault = lambda request: None
            status = fleet.engine.plugin.status
            assert wait_until(lambda: {each.state for each in status()} == {"healthy"}), status()
            assert fleet.generate(PROMPTS, SAMPLING).ids.tolist() == expected.ids.tolist()


def test_servers_that_return_other_log_probs_are_refused() -> None:
    fakes = [FakeVLLM(), FakeVLLM()]
    fakes[1].mode = "processed"
    with FaultServer(fakes[0]) as one, FaultServer(fakes[1]) as two:
        with pytest.raises(InvalidRequestError, match="differ in the log-probs of sampled tokens") as failure:
            corelm.get_backend("vllm", base_url=[one.url, two.url], **OPTIONS)
        assert one.url in str(failure.value) and two.url in str(failure.value)
