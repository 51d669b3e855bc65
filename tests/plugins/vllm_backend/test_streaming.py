"""Streams of a vLLM server, which sends what is new in each event."""

from __future__ import annotations

from typing import Any

import pytest

from corelm.errors import EngineError
from helpers import streamed_servers as servers
from helpers.fake_vllm import Connect, FakeVLLM
from helpers.http_server import FaultServer, event_stream, json_reply
from helpers.tiny_models import tiny_tokenizer

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("logprobs", ["none", "raw"])
def test_streamed_answers_are_those_of_generate(connect: Connect, logprobs: str) -> None:
    servers.check_stream(connect(), logprobs)


def test_a_stop_id_and_a_stop_string_end_a_streamed_answer(connect: Connect) -> None:
    backend = connect()
    free = backend.generate(servers.PROMPTS, servers.GREEDY, logprobs="none").ids.tolist()
    servers.check_stream(backend, "raw", stop_token_ids=[free[0][2]])
    text = tiny_tokenizer().decode(free[1], skip_special_tokens=True)
    servers.check_stream(backend, "raw", stop=[text[1:3]])


def test_tokens_come_one_by_one(connect: Connect, fake: FakeVLLM) -> None:
    servers.check_tokens_come_one_by_one(connect(), fake)


def test_leaving_a_stream_closes_its_connection(connect: Connect, fake: FakeVLLM, server: FaultServer) -> None:
    servers.check_leaving_closes_the_connection(connect(), fake, server)


def test_a_timeout_ends_a_stream(connect: Connect, fake: FakeVLLM) -> None:
    servers.check_a_timeout(connect(), fake)


def test_a_stream_that_breaks_off_fails_its_row_and_is_not_repeated(connect: Connect, fake: FakeVLLM) -> None:
    def first(body: dict[str, Any]) -> dict[str, Any]:
        return {"id": f"cmpl-{body['request_id']}", "choices": [{"finish_reason": None, "token_ids": [7]}]}

    servers.check_a_stream_that_breaks_off(connect(), fake, COMPLETIONS, first)


def test_a_failure_before_the_first_event_is_repeated(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect(max_retries=2)
    fake.fail_row(0, json_reply({"error": {"message": "busy"}}, 503))
    servers.check_stream(backend, "raw")


@pytest.mark.parametrize(
    "events, message",
    [
        ([{"error": {"message": "out of memory", "code": 500}}], "out of memory"),
        ([{"id": "cmpl-other", "choices": []}], "does not name this request"),
        ([], "not built as expected|not a completion"),
    ],
)
def test_events_that_are_no_answer_fail_the_row(
    connect: Connect, fake: FakeVLLM, events: list[Any], message: str
) -> None:
    backend = connect(max_retries=0)
    fake.fault = lambda request: event_stream(events) if request.path == COMPLETIONS else None
    with pytest.raises(EngineError, match=message):
        list(backend.stream(servers.PROMPTS[:1], servers.GREEDY, logprobs="none"))


def test_events_after_the_last_one_of_an_answer_add_nothing(connect: Connect, fake: FakeVLLM) -> None:
    fake.sends_usage = True
    servers.check_stream(connect(), "raw")


def test_a_server_that_ignores_stream_fails_the_row(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect(max_retries=0)
    fake.ignored.add("stream")
    with pytest.raises(EngineError):
        list(backend.stream(servers.PROMPTS[:1], servers.GREEDY, logprobs="none"))


def test_wrong_log_probs_of_a_streamed_row_fail_it(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect()
    fake.spoil = lambda choice: choice["logprobs"]["tokens"].reverse()
    with pytest.raises(EngineError):
        list(backend.stream(servers.PROMPTS[:1], servers.GREEDY))


def test_a_server_without_the_field_streams_nothing_and_answers_in_one_piece(connect: Connect, fake: FakeVLLM) -> None:
    del fake.fields["stream"]
    backend = connect()
    assert not backend.capabilities.streaming
    assert len(list(backend.stream(servers.PROMPTS[:1], servers.GREEDY))) == 1
