"""The backend on a server of core: what a user of both tries first."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import corelm
from corelm.serving import ServerThread

#: What the server samples while it is tried is random, and must not change what is found.
OPENED = 5


def test_a_server_of_core_is_recognised_every_time_and_scores_as_the_model_does(tiny_model: Path) -> None:
    with corelm.get_backend("transformers", str(tiny_model), dtype="float32") as engine, ServerThread(engine) as server:
        options = {"base_url": server.url, "api_key": server.api_key, "tokenizer": str(tiny_model)}
        for _ in range(OPENED):
            with corelm.get_backend("openai", **options) as backend:
                found = backend.capabilities
                assert found.score and found.generation_modes == {"raw"}
                # A server of this protocol may have to sample a token when it scores.
                assert found.max_context == engine.capabilities.max_context - 1
                rows = backend.tokenize("My name is Pip.").ids
                scores, ids = backend.score_logprobs(rows).logprobs.values, rows.values
        # Trying a server out is no conversation.
        assert server.sessions is not None and server.sessions.ids() == ()
        with corelm.get_backend("openai", **options) as backend:
            backend.generate(rows, {"max_new_tokens": 2})
        assert len(server.sessions.ids()) == 1
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        plain = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(scores[1:], plain[:-1].gather(-1, ids[1:, None])[:, 0], atol=1e-4, rtol=0)
