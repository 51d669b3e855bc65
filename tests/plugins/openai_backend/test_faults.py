"""Replies that cannot be believed, servers that do not serve, timeouts, aborts and secrets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import corelm
from corelm import Backend
from corelm.errors import BackendTimeoutError, CapabilityError, EngineError, InvalidRequestError
from helpers.fake_openai import PROTOCOL, FakeOpenAI
from helpers.http_server import FaultServer, hang, json_reply
from helpers.letters import letter_tokenizer, letters

PROMPTS = [letters()[3:9], letters()[40:44], letters()[60:67]]
BAD = PROMPTS[1]
FOUR: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
KEY = "sk-0123456789abcdef"


@pytest.fixture(scope="module")
def fake() -> FakeOpenAI:
    knows = PROTOCOL | {"ignore_eos", "stop_token_ids"}
    return FakeOpenAI(states_ids=True, knows=knows, echoes=0)


@pytest.fixture(scope="module")
def server(fake: FakeOpenAI) -> Iterator[FaultServer]:
    with FaultServer(fake) as running:
        yield running


@pytest.fixture(scope="module")
def backend(server: FaultServer) -> Iterator[Backend]:
    options = {"base_url": f"{server.url}/v1", "tokenizer": letter_tokenizer(), "api_key": KEY, "max_retries": 1}
    with corelm.get_backend("openai", **options) as opened:
        yield opened


@pytest.fixture(autouse=True)
def healed(fake: FakeOpenAI) -> Iterator[None]:
    yield
    fake.change, fake.pause = (lambda body, reply: None), (lambda: None)


def bad_row(change: Callable[[dict[str, Any]], object]) -> Callable[[Any, dict[str, Any]], None]:
    """Return a `FakeOpenAI.change` that spoils the reply to one of the prompts."""

    def spoil(body: Any, reply: dict[str, Any]) -> None:
        if body["prompt"][: len(BAD)] == BAD:
            change(reply)

    return spoil


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets what is at ``path[:-1]`` of a reply to ``path[-1]``."""

    def change(reply: Any) -> None:
        for step in path[:-2]:
            reply = reply[step]
        reply[path[-2]] = path[-1]

    return change


CHOICE = ("choices", 0)
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no choice": (put("choices", []), "not a completion with one choice"),
    "two choices": (lambda reply: reply["choices"].append(reply["choices"][0]), "not a completion with one choice"),
    "another prompt": (put(*CHOICE, "prompt_token_ids", [1, 2]), "it answers another prompt"),
    "another length": (put("usage", "prompt_tokens", 7), "it read 7 tokens, but the prompt has 4"),
    "a foreign id": (put(*CHOICE, "token_ids", 0, 9999), "its token has id 9999"),
    "no ids": (put(*CHOICE, "token_ids", None), "not a list of integers"),
    "too many": (lambda reply: reply["choices"][0]["token_ids"].append(70), "log-probs for 5 tokens"),
    "another token": (put(*CHOICE, "logprobs", "tokens", 1, "~~"), "log-prob 1 is that of '~~'"),
    "a number that is none": (put(*CHOICE, "logprobs", "token_logprobs", 2, "x"), "log-prob"),
    "above zero": (put(*CHOICE, "logprobs", "token_logprobs", 2, 0.5), "log-prob"),
    "no log-probs": (put(*CHOICE, "logprobs", None), "it has no log-probs"),
    "cut off": (put(*CHOICE, "finish_reason", "content_filter"), "finish reason is 'content_filter'"),
    "early": (put(*CHOICE, "finish_reason", "stop"), "it stops at id"),
}


def test_a_bad_reply_fails_its_row_alone(backend, fake):
    good = backend.generate(PROMPTS, FOUR)
    for fault, (change, why) in FAULTS.items():
        fake.change = bad_row(change)
        batch = backend.generate(PROMPTS, FOUR, on_error="skip")
        assert batch.finish_reasons == ("length", "error", "length"), fault
        assert why in batch.errors[1] and not batch.errors[0] and not batch.errors[2], fault
        assert batch.ids.tolist()[::2] == good.ids.tolist()[::2], fault
        with pytest.raises(EngineError) as caught:
            backend.generate(PROMPTS, FOUR)
        assert caught.value.rows == (1,) and why in str(caught.value), fault


SCORE_FAULTS = {
    "the first one scored": (put(*CHOICE, "logprobs", "token_logprobs", 0, -1.0), "counts positions differently"),
    "others scored": (put(*CHOICE, "logprobs", "tokens", 1, "~~"), "it scores '~~' at position 1"),
    "too few": (put(*CHOICE, "logprobs", {"tokens": ["a"], "token_logprobs": [None]}), "1 tokens for a prompt of 4"),
    "another length": (put("usage", "prompt_tokens", 7), "it read 7 tokens"),
}


def test_a_bad_score_fails_its_row_alone(backend, fake):
    for fault, (change, why) in SCORE_FAULTS.items():
        fake.change = bad_row(change)
        batch = backend.score_logprobs(PROMPTS, on_error="skip")
        assert why in batch.errors[1] and not batch.errors[0] and not batch.errors[2], fault
        assert batch.scored.lengths.tolist() == [6, 4, 7] and batch.scored.values.sum() == 5 + 6, fault


def test_a_wrong_key_is_said_without_the_key():
    for status in (401, 403):
        refused = lambda request, status=status: json_reply({"error": {"message": f"bad key {KEY}"}}, status)  # noqa: E731
        with FaultServer(refused) as server, pytest.raises(EngineError, match="CORELM_OPENAI_API_KEY") as caught:
            corelm.get_backend("openai", base_url=server.url, tokenizer=letter_tokenizer(), api_key=KEY)
        assert KEY not in str(caught.value) and "***" in str(caught.value), status


def test_the_key_of_one_service_is_not_sent_to_another(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("CORELM_OPENAI_API_KEY", "one-for-this-server")
    refused = lambda request: json_reply({"error": "no"}, 401)  # noqa: E731
    with FaultServer(refused) as server, pytest.raises(EngineError):
        corelm.get_backend("openai", base_url=server.url, tokenizer=letter_tokenizer())
    sent = {request.headers.get("Authorization") for request in server.requests}
    assert sent == {"Bearer one-for-this-server"}


def test_the_variables_of_openais_client_are_defaults(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("CORELM_OPENAI_API_KEY", raising=False)
    refused = lambda request: json_reply({"error": "no"}, 401)  # noqa: E731
    with FaultServer(refused) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        with pytest.raises(EngineError, match="OPENAI_API_KEY"):
            corelm.get_backend("openai", tokenizer=letter_tokenizer())
        assert {request.headers.get("Authorization") for request in server.requests} == {f"Bearer {KEY}"}
        server.requests.clear()
        with pytest.raises(EngineError):
            corelm.get_backend("openai", base_url=server.url, tokenizer=letter_tokenizer())
        assert {request.headers.get("Authorization") for request in server.requests} == {None}
    monkeypatch.delenv("OPENAI_BASE_URL")
    with pytest.raises(InvalidRequestError, match="OPENAI_BASE_URL"):
        corelm.get_backend("openai", tokenizer=letter_tokenizer())


def test_opening_leaves_no_thread_behind_if_it_fails():
    before = threading.active_count()
    with FaultServer(lambda request: hang()) as server, pytest.raises(BackendTimeoutError, match="open_timeout"):
        corelm.get_backend("openai", "a", base_url=server.url, tokenizer=letter_tokenizer(), open_timeout=0.5)
    assert threading.active_count() == before


def test_without_a_context_an_answer_cannot_fill_it(fake):
    def without_limit(request: Any) -> Any:
        return json_reply({"data": [{"id": "letters"}]}) if request.path == "/v1/models" else fake(request)

    with ExitStack() as stack:
        server = stack.enter_context(FaultServer(without_limit))
        options = {"base_url": server.url, "tokenizer": letter_tokenizer()}
        backend = stack.enter_context(corelm.get_backend("openai", **options))
        assert backend.capabilities.max_context is None
        with pytest.raises(CapabilityError) as lack:
            backend.generate(PROMPTS, {"max_new_tokens": None}, logprobs="none")
        assert lack.value.capability == "max_context"
        with pytest.raises(InvalidRequestError, match="servers raise"):
            backend.generate(PROMPTS, {**FOUR, "temperature": 0.001}, logprobs="none")
