"""What a server refuses, in the shape of the protocol's errors: wrong fields, keys, sizes, and too many requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from corelm import Backend
from corelm.errors import InvalidRequestError
from corelm_serve import ServerOptions, ServerThread
from helpers.fakes import Gate, fake
from helpers.processes import wait_until
from helpers.serving import CHAT, client_of, http_of, serving

COMPLETIONS, CHATS, TOKENS = "/v1/completions", "/v1/chat/completions", "/v1/tokens"

#: A path, a body, the field at fault, and a part of what is said about it.
WRONG: list[tuple[str, Any, str | None, str]] = [
    (CHATS, [], "body", "expected a JSON object"),
    (CHATS, {}, "messages", "expected a list of at least one message"),
    (CHATS, {"messages": CHAT, "mesages": 1}, "mesages", "did you mean 'messages'?"),
    (CHATS, {"messages": CHAT, "logit_bias": {"5": 1}}, "logit_bias", "leave it out"),
    (CHATS, {"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format", "not constrained"),
    (CHATS, {"messages": CHAT, "parallel_tool_calls": False}, "parallel_tool_calls", "give true or leave it out"),
    (CHATS, {"messages": CHAT, "functions": [{"name": "f"}]}, "functions", "give tools instead"),
    (CHATS, {"messages": CHAT, "n": 0}, "n", "expected a whole number of at least 1"),
    (CHATS, {"messages": CHAT, "n": 1000}, "n", "at most 128"),
    (CHATS, {"messages": CHAT, "n": True}, "n", "got True"),
    (CHATS, {"messages": CHAT, "max_tokens": 0}, "max_tokens", "at least 1"),
    (CHATS, {"messages": CHAT, "max_completion_tokens": "8"}, "max_completion_tokens", "a whole number"),
    (CHATS, {"messages": CHAT, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "give one of them"),
    (CHATS, {"messages": CHAT, "max_tokens": 5000}, "messages", "give max_tokens="),
    (CHATS, {"messages": CHAT, "temperature": -1}, "temperature", "got -1"),
    (CHATS, {"messages": CHAT, "top_p": 0.5}, "top_p", "does not honour top_p"),
    (CHATS, {"messages": CHAT, "stop": [""]}, "stop", "at least one character"),
    (CHATS, {"messages": CHAT, "stop": "a<|im_end|>"}, "stop", "special token"),
    (CHATS, {"messages": CHAT, "seed": "x"}, "seed", "a whole number"),
    (CHATS, {"messages": CHAT, "stream": "yes"}, "stream", "expected True or False"),
    (CHATS, {"messages": CHAT, "stream_options": {"include_usage": True}}, "stream_options", "give stream=true"),
    (CHATS, {"messages": CHAT, "top_logprobs": 2}, "top_logprobs", "give logprobs=true"),
    (CHATS, {"messages": CHAT, "logprobs": True, "top_logprobs": 999}, "top_logprobs", "260"),
    (CHATS, {"messages": CHAT, "tools": [{"type": "web"}]}, "tools[0]", "expected"),
    (CHATS, {"messages": CHAT, "tool_choice": "required"}, "tool_choice", 'give "auto" or "none"'),
    (CHATS, {"messages": CHAT, "tool_choice": "auto"}, "tool_choice", "give tools"),
    (CHATS, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "expected one of"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", "neither content nor tool_calls"),
    (CHATS, {"messages": [{"role": "user", "content": "x", "age": 1}]}, "messages[0].age", "does not know"),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        'content: expected a text, or a list of parts such as {"type": "text"',
    ),
    (CHATS, {"messages": [{"role": "user", "content": "\ud83d"}]}, "messages", "lone surrogate"),
    (
        CHATS,
        {"messages": CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs",
        "leave it",
    ),
    (CHATS, {"messages": CHAT, "chat_template_kwargs": {"max_length": 5}}, "chat_template_kwargs", "max_length"),
    (CHATS, {"messages": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs", "expected an object"),
    (CHATS, {"messages": [*CHAT, {"role": "assistant", "content": "I"}]}, "messages", "add_generation_prompt=true"),
    (CHATS, {"messages": CHAT, "add_generation_prompt": False}, "add_generation_prompt", "give one of the two"),
    (CHATS, {"messages": CHAT, "continue_final_message": "yes"}, "continue_final_message", "expected True or False"),
    (
        CHATS,
        {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
        "give one of the two",
    ),
    (CHATS, {"messages": CHAT, "model": 5}, "model", "expected a text"),
    (COMPLETIONS, {}, "prompt", "expected a text"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "texts only"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt", "lists of ids only"),
    (COMPLETIONS, {"prompt": [1, 9999]}, "prompt", "outside the vocabulary"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "at least 0"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "give echo=true"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0, "ech0": True}, "ech0", "did you mean 'echo'?"),
    (COMPLETIONS, {"prompt": "a", "suffix": "z"}, "suffix", "leave it out"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "give n and choose"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs", "a whole number"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 5000}, "logprobs", "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 5000, "echo": True}, "logprobs", "logprobs"),
    (CHATS, {"messages": CHAT, "max_completion_tokens": 5000}, "messages", "give max_completion_tokens="),
    (CHATS, {"messages": CHAT, "stop": [str(at) for at in range(65)]}, "stop", "at most 64"),
    (COMPLETIONS, {"prompt": ["a"] * 5000}, "prompt", "more than 4096 answers"),
    (COMPLETIONS, {"prompt": "a", "messages": CHAT}, "messages", "send it to /v1/chat/completions"),
    (COMPLETIONS, {"messages": CHAT}, "messages", "send it to /v1/chat/completions"),
    (CHATS, {"prompt": "a"}, "prompt", "send it to /v1/completions"),
    (CHATS, {"messages": CHAT, "prompt_token_ids": [1]}, "prompt_token_ids", "send it to /v1/tokens"),
    (TOKENS, {"prompt_token_ids": "abc"}, "prompt_token_ids", "a list of ids"),
    (TOKENS, {"prompt_token_ids": [1], "stream": True}, "stream", "does not know this field"),
    (TOKENS, {"prompt_token_ids": [1], "logprobs": "all"}, "logprobs", "expected one of"),
    (TOKENS, {"prompt_token_ids": [3], "logprobs": "none", "top_logprobs": 2}, "top_logprobs", "as raw or processed"),
    (TOKENS, {"prompt_token_ids": [[]]}, "prompt_token_ids", "has no tokens"),
]


def test_a_wrong_request_is_refused_with_the_field_and_what_to_type(shared_server: ServerThread) -> None:
    with http_of(shared_server) as client:
        for path, body, field, said in WRONG:
            answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["type"] == "invalid_request_error", (path, str(body)[:200])
            assert error["param"] == field and said in error["message"], error


def test_what_is_not_json_is_refused(shared_server: ServerThread) -> None:
    with http_of(shared_server) as client:
        for body in (b"", b"{", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'{"n": ' + b"9" * 9000 + b"}"):
            answer = client.post(CHATS, content=body, headers={"content-type": "application/json"})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["message"].startswith(
                ("body: expected a JSON object, but ", "n: ")
            ), error


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ServerThread]:
    import corelm

    with corelm.get_backend("toy") as backend, ServerThread(backend, ServerOptions(model_name="m")) as server:
        yield server


def test_fields_that_say_something_about_the_client_change_nothing(shared_server: ServerThread) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": CHAT, "max_tokens": 9, "seed": 4}
    harmless = {
        "user": "someone",
        "metadata": {"a": "b"},
        "store": True,
        "safety_identifier": "x",
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "logit_bias": {},
        "frequency_penalty": 0,
        "top_p": 1,
    }
    with client_of(shared_server) as client:
        with_them = client.chat.completions.create(**asked, **harmless)
        without = client.chat.completions.create(**asked)
    assert with_them.choices[0].message.content == without.choices[0].message.content


def test_only_the_key_opens_and_it_is_asked_for_first(shared_server: ServerThread) -> None:
    client = client_of(shared_server)
    with client.with_options(api_key=shared_server.api_key[:-1]) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model="m", messages=CHAT)
    with http_of(shared_server) as http:
        for headers in (
            {"authorization": ""},
            {"authorization": shared_server.api_key},
            {"authorization": f"Basic {shared_server.api_key}"},
            {"authorization": "Bearer ké".encode("latin-1")},
        ):
            for method, path in (("POST", CHATS), ("GET", "/sessions"), ("GET", "/v1/models"), ("GET", "/none")):
                answer = http.request(method, path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert shared_server.api_key not in answer.text
        assert http.get("/health", headers={"authorization": ""}).json() == {"status": "ok"}
        lower = http.get("/v1/models", headers={"authorization": f"bearer {shared_server.api_key}"})
        assert lower.status_code == 200


def test_other_paths_and_methods_are_not_found(shared_server: ServerThread) -> None:
    with http_of(shared_server) as client:
        missing, wrong = client.post(CHATS.removeprefix("/v1")), client.get(CHATS)
        assert missing.status_code == 404 and CHATS in missing.json()["error"]["message"]
        assert wrong.status_code == 405 and wrong.json()["error"]["message"].endswith("send POST")
        assert wrong.json()["error"]["code"] == "method_not_allowed"
        unnamed = client.post(CHATS, json={"model": "m", "messages": CHAT}, headers={"x-session-id": "a/b"})
        assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "X-Session-Id"
        assert unnamed.json()["error"]["message"].startswith("X-Session-Id: expected 1 to 128 letters")
        # A name of any length is named, and not sent back whole.
        long = client.post(CHATS, json={"messages": CHAT, "x" * 300_000: 1})
        assert long.status_code == 400 and "xxx" in long.json()["error"]["message"] and len(long.content) < 2000
        assert client.get("/sessions/none-of-this-name").json()["error"]["code"] == "session_not_found"
        assert client.get("/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_another_content_type_is_refused(shared_server: ServerThread) -> None:
    # A page in a browser can send this one to any site.
    with http_of(shared_server) as client:
        answer = client.post(CHATS, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "content-type"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused_and_the_connection_goes_on(toy: Backend, chunked: bool) -> None:
    with serving(toy, model_name="m", max_body=1000) as server, http_of(server) as client:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 3_000_000}]}).encode()
        content = iter([body[:1000], body[1000:]]) if chunked else body
        answer = client.post(CHATS, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413 and "larger than 1000 bytes" in answer.json()["error"]["message"]
        assert client.post(CHATS, json={"messages": CHAT, "max_tokens": 3}).status_code == 200


def test_a_full_server_tells_clients_to_come_again() -> None:
    gate = Gate()
    with (
        fake(gate) as backend,
        serving(backend, model_name="m", max_requests=2, sessions=False) as server,
        http_of(server) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        asked = {"prompt": [3], "max_tokens": 2}
        under_way = [pool.submit(client.post, COMPLETIONS, json=asked) for _ in range(2)]
        # One that is sent before would take the place of the second.
        assert wait_until(lambda: server.service.admitted_now == 2)
        answer = client.post(COMPLETIONS, json=asked)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1" and answer.json()["error"]["code"] == "queue_full"
        gate.opened.set()
        assert {each.result().status_code for each in under_way} == {200}
        # A request counts until its reply has been sent, which the client may see first.
        assert wait_until(lambda: server.service.admitted_now == 0)
        assert client.post(COMPLETIONS, json=asked).status_code == 200


def test_a_request_that_takes_too_long_is_told_so() -> None:
    gate = Gate()
    with (
        fake(gate) as backend,
        serving(backend, model_name="m", timeout=0.2) as server,
        http_of(server) as client,
    ):
        answer = client.post(COMPLETIONS, json={"prompt": [3], "max_tokens": 2})
        gate.opened.set()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"


def test_an_engine_that_fails_is_a_server_error() -> None:
    def fail(result: Any) -> Any:
        raise RuntimeError("out of memory")

    with fake(fail) as backend, serving(backend, model_name="m") as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            client.completions.create(model="m", prompt=[3], max_tokens=2)
        with pytest.raises(openai.APIError):
            list(client.completions.create(model="m", prompt=[3], max_tokens=2, stream=True))


def test_without_a_key_only_names_of_this_machine_are_answered(toy: Backend) -> None:
    from corelm_serve import ServingApp

    app = ServingApp(toy, ServerOptions())
    transport = httpx2.ASGITransport(app=app)

    async def ask(host: str) -> int:
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return (await client.get("/v1/models", headers={"host": host})).status_code

    import asyncio

    assert asyncio.run(ask("127.0.0.1:8000")) == 200 and asyncio.run(ask("localhost")) == 200
    assert asyncio.run(ask("another.example")) == 400
    app.service.backend.cleanup()


def test_wrong_options_are_refused_without_showing_the_key() -> None:
    for name, value in {"max_body": 0, "max_requests": "x", "timeout": -1, "api_key": "a\nb"}.items():
        with pytest.raises(InvalidRequestError) as error:
            ServerOptions(**{name: value})
        assert error.value.field == name and "a\nb" not in str(error.value)
