"""The backend on a server of core: what a user of both tries first."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import corelm
from corelm_serve import ServerThread

#: Answers to each prompt.
SAMPLES = 16


# What the server samples while it is tried is random, and must not change what is found.
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.nightly)])
def test_a_server_of_core_is_recognised_every_time_and_scores_as_the_model_does(tiny_model: Path, times: int) -> None:
    with corelm.get_backend("transformers", str(tiny_model), dtype="float32") as engine, ServerThread(engine) as server:
        options = {"base_url": server.url, "api_key": server.api_key, "tokenizer": str(tiny_model)}
        for _ in range(times):
            with corelm.get_backend("openai", **options) as backend:
                found = backend.capabilities
                assert found.score and found.generation_modes == {"raw"}
                # A server of this protocol may have to sample a token when it scores.
                assert found.max_context == engine.capabilities.max_context - 1
                rows = backend.tokenize("My name is Pip.").ids
                scores, ids = backend.score_logprobs(rows).logprobs.values, rows.values
        # Trying a server out is no conversation.
        assert server.sessions is not None and server.sessions.ids() == ()
    torch.testing.assert_close(scores[1:], plain_scores(tiny_model, ids)[1:], atol=1e-4, rtol=0)


def test_every_sampled_id_is_known_whatever_its_text(tiny_model: Path) -> None:
    prompts, sampling = (
        ["My name is Pip.", "a"],
        {"max_new_tokens": 16, "temperature": 1.0, "num_samples": SAMPLES, "seed": 1},
    )
    with corelm.get_backend("transformers", str(tiny_model), dtype="float32") as engine, ServerThread(engine) as server:
        options = {"base_url": server.url, "api_key": server.api_key, "tokenizer": str(tiny_model)}
        with corelm.get_backend("openai", **options) as backend:
            assert backend.capabilities.vocab_size == engine.capabilities.vocab_size > len(backend.tokenizer)
            rows = backend.tokenize(prompts).ids
            batch = backend.generate(rows, sampling)
            assert server.sessions is not None and server.sessions.ids()
            texts = [backend.tokenizer.decode([token]) for token in batch.ids.values.tolist()]
    assert "error" not in batch.finish_reasons and batch.errors is None
    # Parts of characters, and ids without an entry in the tokenizer, of which the model has 331.
    assert any("\ufffd" in text for text in texts) and "" in texts
    answers = zip(batch.ids.split(), batch.logprobs.split(), strict=True)
    for number, (answer, logprobs) in enumerate(answers):
        ids = torch.cat([rows.split()[number // SAMPLES], answer])
        torch.testing.assert_close(logprobs, plain_scores(tiny_model, ids)[-len(answer) :], atol=1e-4, rtol=0)


@cache
def plain_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def plain_scores(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of each id given those before it, from a plain forward; that of the first is 0."""
    with torch.no_grad():
        logprobs = plain_model(path)(input_ids=ids[None]).logits[0].log_softmax(-1)
    return torch.cat([torch.zeros(1), logprobs[:-1].gather(-1, ids[1:, None])[:, 0]])
