"""Checks of a server in front of a real engine, which the tests of each engine share."""

import torch
from torch import nn

from corelm import Backend
from helpers import oracle
from helpers.processes import wait_until
from helpers.serving import CHAT, client_of, http_of, raw_request, serving


def check_answers(backend: Backend, model: nn.Module, **sampling: float) -> None:
    """Chat, stream and score with the official client, and compare all log-probs with a plain forward.

    Args:
        model: the model that the engine serves.
        sampling: how to sample, if not greedily.
    """
    with serving(backend, model_name="m") as server, client_of(server) as client, http_of(server) as http:
        asked = {"model": "m", "messages": CHAT, "max_tokens": 12, "temperature": 0.0, **sampling}
        named = {"x-session-id": "s"}
        answer = client.chat.completions.create(**asked, logprobs=True, extra_headers=named).choices[0]
        parts = [part.choices[0] for part in client.chat.completions.create(**asked, stream=True)]
        if not sampling or backend.capabilities.per_answer_seeds:
            assert "".join(part.delta.content or "" for part in parts) == answer.message.content
        assert parts[-1].finish_reason in ("stop", "length")
        node = http.get("/sessions/s").json()["nodes"][-1]
        sampled = torch.tensor(node["sampled"])
        recorded = torch.tensor([value or 0.0 for value in node["log_probs"]])[sampled]
        expected = oracle.logprobs(model, node["token_ids"])[sampled]
        torch.testing.assert_close(recorded, expected, rtol=0, atol=1e-4)
        shown = torch.tensor([each.logprob for each in answer.logprobs.content])
        torch.testing.assert_close(shown, expected, rtol=0, atol=1e-4)
        top = min(1, backend.capabilities.score_top_k)
        echo = {"max_tokens": 0, "echo": True, "logprobs": top}
        scored = client.completions.create(model="m", prompt="The cat", **echo).choices[0]
        plain = oracle.logprobs(model, backend.tokenize("The cat").ids.tolist()[0])[1:]
        found = torch.tensor(scored.logprobs.token_logprobs[1:])
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-4)


def check_hanging_up(backend: Backend, *, stream: bool) -> None:
    """Hang up in the middle of an answer, and assert that the engine is told and the partial answer is recorded."""
    with serving(backend, model_name="m") as server:
        asked = {"prompt": [5, 6], "max_tokens": 400, "ignore_eos": True, "stream": stream}
        sock = raw_request(server, "/v1/completions", asked)
        if stream:
            sock.recv(4096)
        else:
            assert wait_until(lambda: server.service.backend.state().in_flight == 1)
        sock.close()
        assert wait_until(lambda: server.service.admitted_now == 0)
        assert server.sessions is not None
        nodes = [node for name in server.sessions.ids() for node in server.sessions.get(name).nodes]
        answers = [node for node in nodes if node.kind == "answer"]
        assert {node.finish_reason for node in answers} <= {"abort"}
        # Nothing may have been sampled of an answer that is not streamed.
        assert len(answers) == 1 or not stream
        assert backend.health()
