"""A real SGLang server behind the server."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

pytest.importorskip("openai", reason="the official client is not installed")

from corelm import Backend
from helpers.serving import CHAT, http_of, serving
from helpers.serving_checks import check_answers, check_hanging_up


def test_the_official_client_chats_streams_and_scores(shared: Backend, model: PreTrainedModel) -> None:
    check_answers(shared, model)
    check_answers(shared, model, temperature=1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_aborts_its_request(shared: Backend, stream: bool) -> None:
    check_hanging_up(shared, stream=stream)


def test_log_probs_that_it_does_not_have_are_refused_and_not_recorded(shared: Backend) -> None:
    # Its log-probs are of the distribution at the temperature of the request.
    asked = {"messages": CHAT, "max_tokens": 4, "temperature": 0.5}
    with serving(shared, model_name="m") as server, http_of(server) as client:
        refused = client.post("/v1/chat/completions", json={**asked, "logprobs": True})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "unsupported"
        name = client.post("/v1/chat/completions", json=asked).headers["x-session-id"]
        assert client.get(f"/sessions/{name}").json()["nodes"][-1]["log_probs"] is None
