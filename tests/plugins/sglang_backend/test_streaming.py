"""Streams of an SGLang server, whose events have the whole answer so far."""

from __future__ import annotations

from typing import Any

import pytest

from corelm.errors import EngineError
from helpers import streamed_servers as servers
from helpers.http_server import event_stream
from helpers.tiny_models import tiny_tokenizer

GENERATE = "/generate"


def event(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    meta = {"id": body["rid"], "finish_reason": None, "weight_version": "default", **changes}
    return {"text": "", "output_ids": [7], "meta_info": meta}


@pytest.mark.parametrize("logprobs", ["none", "raw"])
def test_streamed_answers_are_those_of_generate(connect, logprobs):
    servers.check_stream(connect(), logprobs)


def test_a_stop_that_the_server_misses_ends_a_streamed_answer(connect):
    backend = connect()
    free = backend.generate(servers.PROMPTS, servers.GREEDY, logprobs="none").ids.tolist()
    servers.check_stream(backend, "raw", stop_token_ids=[free[0][2]])
    text = tiny_tokenizer().decode(free[1], skip_special_tokens=True)
    servers.check_stream(backend, "raw", stop=[text[:4]])


def test_tokens_come_one_by_one(connect, fake):
    servers.check_tokens_come_one_by_one(connect(), fake)


def test_leaving_a_stream_ends_its_request(connect, fake, server):
    servers.check_leaving_closes_the_connection(connect(), fake, server)


def test_events_after_the_last_one_of_an_answer_add_nothing(connect, fake):
    fake.repeats_last_event = True
    servers.check_stream(connect(), "raw")


def test_a_stream_that_breaks_off_fails_its_row_and_is_not_repeated(connect, fake):
    servers.check_a_stream_that_breaks_off(connect(), fake, GENERATE, event)


def test_a_row_that_the_server_refuses_in_an_event_fails_alone(connect, fake):
    refused = {"type": "abort", "message": "too many tokens", "status_code": 400}

    def fault(request):
        if request.path != GENERATE or request.body["input_ids"] != servers.PROMPTS[1]:
            return None
        return event_stream([event(request.body, finish_reason=refused)])

    backend = connect()
    fake.fault = fault
    stream = backend.stream(servers.PROMPTS, servers.GREEDY, on_error="skip")
    assert [chunk.finish_reason for chunk in stream if chunk.row == 1] == ["error"]
    assert "status 400: too many tokens" in stream.result.errors[1]
    assert stream.result.finish_reasons == ("length", "error", "length")


def test_a_request_that_the_server_still_runs_is_sent_under_another_id(connect, fake):
    first = []

    def fault(request):
        if request.path != GENERATE or request.body["input_ids"] != servers.PROMPTS[2] or first:
            return None
        first.append(request.body["rid"])
        return event_stream([{"error": {"message": f"Duplicate request ID: {first[0]}", "code": 400}}])

    backend = connect()
    fake.fault = fault
    stream = backend.stream(servers.PROMPTS, servers.GREEDY)
    ids = [i for chunk in stream if chunk.row == 2 for i in chunk.ids]
    assert first and ids == stream.result.ids.tolist()[2]


def test_a_server_that_streams_deltas_answers_in_one_piece(connect, fake):
    fake.server_info["incremental_streaming_output"] = True
    backend = connect()
    assert not backend.capabilities.streaming
    assert len(list(backend.stream(servers.PROMPTS[:1], servers.GREEDY))) == 1


def test_other_weights_fail_a_streamed_row(connect, fake):
    backend = connect()
    fake.weight_label = "other"
    with pytest.raises(EngineError):
        list(backend.stream(servers.PROMPTS[:1], servers.GREEDY))
