"""Sessions over HTTP: which one a request belongs to, what the engine reads again, and how history forks."""

from __future__ import annotations

from typing import Any

import pytest

from corelm import Backend
from corelm_serve import ServerThread, SessionStore
from helpers.adapter_toys import ADD, CONFIG, AdapterToy, true_scores
from helpers.serving import CHAT, Seen, chat_ids, client_of, http_of, serving

THEN = {"role": "user", "content": "And the sea?"}


def chat(client: Any, messages: list[Any], session: str | None = None, **more: Any) -> tuple[str, str]:
    """Return the answer and the name of its session."""
    headers = {} if session is None else {"x-session-id": session}
    asked = {"messages": messages, "max_tokens": 16, "temperature": 0.8, **more}
    answer = client.post("/v1/chat/completions", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.headers["x-session-id"]


def test_the_next_turn_reads_the_ids_that_were_sampled(server: ServerThread, seen: Seen) -> None:
    with http_of(server) as client:
        said, session = chat(client, CHAT, seed=1)
        _, again = chat(client, [*CHAT, {"role": "assistant", "content": said}, THEN], seed=2)
    assert session == again
    (prompt, answer), (second, _) = seen.answers
    assert second[: len(prompt) + len(answer)] == (*prompt, *answer)
    assert server.sessions is not None
    record = server.sessions.get(session)
    assert [node.kind for node in record.nodes] == ["message", "answer", "message", "answer"]
    row = record.row(record.nodes[-1])
    assert tuple(row.token_ids) == tuple(pair for part in seen.answers[1] for pair in part)


def test_a_prompt_is_what_the_template_of_the_tokenizer_says(tiny: Backend, seen: Seen) -> None:
    with serving(tiny) as server, http_of(server) as client:
        chat(client, [{"role": "developer", "content": "Be brief."}, *CHAT])
    assert list(seen.answers[0][0]) == chat_ids([{"role": "system", "content": "Be brief."}, *CHAT])


def test_a_rewritten_history_forks(toy_server: ServerThread) -> None:
    with http_of(toy_server) as client:
        said, session = chat(client, CHAT, "mine", seed=1)
        chat(client, [*CHAT, {"role": "assistant", "content": said}, THEN], "mine")
        chat(client, [*CHAT, {"role": "assistant", "content": "something else"}, THEN], "mine")
        listed = client.get("/sessions").json()["data"]
        nodes = client.get("/sessions/mine").json()["nodes"]
    assert session == "mine" and listed == ["mine"]
    children = [node["parent"] for node in nodes]
    assert children.count(0) == 2 and children.count(None) == 1


def test_several_answers_are_siblings_with_their_choice(toy_server: ServerThread) -> None:
    with http_of(toy_server) as client:
        chat(client, CHAT, "n", n=3)
        nodes = client.get("/sessions/n").json()["nodes"]
    assert [(node["parent"], node["choice"]) for node in nodes if node["kind"] == "answer"] == [(0, 0), (0, 1), (0, 2)]


def test_completions_and_ids_are_recorded_and_scores_are_not(toy_server: ServerThread, seen: Seen) -> None:
    with http_of(toy_server) as client:
        asked = {"prompt": "The cat", "max_tokens": 4}
        named = {"x-session-id": "text"}
        assert client.post("/v1/completions", json=asked, headers=named).headers["x-session-id"] == "text"
        first = seen.answers[0]
        asked = {"prompt_token_ids": [*first[0], *first[1], 32], "max_tokens": 4}
        assert client.post("/v1/tokens", json=asked, headers=named).headers["x-session-id"] == "text"
        scored = client.post("/v1/completions", json={"prompt": "The", "max_tokens": 0, "echo": True, "logprobs": 1})
        assert "x-session-id" not in scored.headers
        kinds = [node["kind"] for node in client.get("/sessions/text").json()["nodes"]]
        assert client.get("/sessions").json()["data"] == ["text"]
    assert kinds == ["prompt", "answer", "prompt", "answer"]


def test_a_refused_request_leaves_no_session(toy_server: ServerThread) -> None:
    with http_of(toy_server) as client:
        answer = client.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 10_000})
        assert answer.status_code == 400
        wrong = client.post("/v1/chat/completions", json={"messages": CHAT}, headers={"x-session-id": "a b"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "X-Session-Id"
        assert client.get("/sessions").json()["data"] == []


def test_a_store_of_the_program_is_used(toy: Backend) -> None:
    store = SessionStore(limit_sessions=1)
    with serving(toy, store, model_name="m") as server, client_of(server) as client:
        for name in ("a", "b"):
            client.chat.completions.create(model="m", messages=CHAT, max_tokens=3, extra_headers={"x-session-id": name})
    assert store.ids() == ("b",) and store.dropped == 1


def test_the_adapter_of_the_server_answers() -> None:
    with Backend.from_plugin(AdapterToy.of_table(), "adapted") as backend:
        backend.load_adapter("policy", {"added": ADD}, config=CONFIG)
        with serving(backend, model_name="m", adapter="policy") as server, http_of(server) as client:
            chat(client, CHAT, "a")
            nodes = client.get("/sessions/a").json()["nodes"]
            asked = {"prompt": "The", "max_tokens": 0, "echo": True, "logprobs": 1}
            scored = client.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]["token_logprobs"]
        (ids,) = backend.tokenize("The").ids.tolist()
    assert nodes[-1]["provenance"]["adapter"] == "policy"
    assert scored[1:] == pytest.approx(true_scores(ids, ADD), abs=1e-4)
