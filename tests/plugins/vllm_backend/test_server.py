"""The server fails for one row, for all of them, or for a moment; calls time out, are aborted or closed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from corelm.errors import BackendClosedError, BackendTimeoutError, EngineError
from helpers.fake_vllm import PROMPTS, SAMPLING, Connect, FakeVLLM
from helpers.http_server import FaultServer, Reply, Request, hang, json_reply, raw, reset

TRANSIENT = {
    "429": json_reply({"error": {"message": "busy"}}, 429, {"Retry-After": "0"}),
    "500": json_reply({"error": {"message": "step failed"}}, 500),
    "503": raw(b"", 503),
    "not-json": raw(b"<html>\xff"),
    "truncated": raw(b'{"choices": [{"token_ids": [1,'),
    "reset": reset(),
}


def hang_completions(request: Request) -> Reply | None:
    return hang() if request.path == "/v1/completions" else None


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_transient_failure_does_not_change_the_result(connect: Connect, fake: FakeVLLM, fault: str) -> None:
    backend = connect(max_retries=2)
    expected = backend.generate(PROMPTS, SAMPLING)
    fake.fail_row(1, TRANSIENT[fault])
    found = backend.generate(PROMPTS, SAMPLING)
    assert found.ids.tolist() == expected.ids.tolist() and found.finish_reasons == expected.finish_reasons


@pytest.mark.parametrize("status", [400, 500])
def test_a_prompt_that_fails_does_not_affect_the_other_rows(connect: Connect, fake: FakeVLLM, status: int) -> None:
    backend = connect(max_retries=0)
    expected = backend.generate(PROMPTS, SAMPLING)
    reply = json_reply({"error": {"message": "this one row"}}, status)
    fake.fail_row(1, reply)
    result = backend.generate(PROMPTS, SAMPLING, on_error="skip")
    assert result.finish_reasons == ("length", "error", "length") and result.errors is not None
    assert "this one row" in result.errors[1] and result.errors[0] == result.errors[2] == ""
    assert [result.ids.tolist()[row] for row in (0, 2)] == [expected.ids.tolist()[row] for row in (0, 2)]
    fake.fail_row(1, reply)
    with pytest.raises(EngineError, match="this one row") as caught:
        backend.generate(PROMPTS, SAMPLING)
    assert caught.value.rows == (1,)


def test_a_sequence_that_fails_does_not_affect_the_other_rows(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect()
    fake.fail_row(1, json_reply({"error": {"message": "this one row"}}, 400))
    rows = [[*prompt, 3] for prompt in PROMPTS]
    result = backend.score_logprobs(rows, on_error="skip")
    assert result.errors is not None and [bool(text) for text in result.errors] == [False, True, False]
    assert [any(row) for row in result.scored.tolist()] == [True, False, True]


def test_the_call_fails_if_no_row_is_served(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect(max_retries=0)
    fake.fault = lambda request: json_reply({"error": {"message": "engine is dead"}}, 500)
    with pytest.raises(EngineError, match="engine is dead"):
        backend.generate(PROMPTS, SAMPLING, on_error="skip")
    assert not backend.health()


def test_calls_to_a_hanging_server_time_out_and_close_their_connections(
    connect: Connect, server: FaultServer, fake: FakeVLLM
) -> None:
    backend = connect()
    fake.fault = hang_completions
    for call in (
        lambda: backend.generate(PROMPTS, SAMPLING, timeout=0.3),
        lambda: backend.score_logprobs([[*prompt, 3] for prompt in PROMPTS], timeout=0.3),
    ):
        with pytest.raises(BackendTimeoutError):
            call()
    server.wait_for(lambda: server.in_flight == 0)
    fake.fault = lambda request: None
    assert backend.generate(PROMPTS, SAMPLING).finish_reasons == ("length",) * 3


def test_closing_the_backend_ends_a_running_call(connect: Connect, server: FaultServer, fake: FakeVLLM) -> None:
    backend = connect()
    fake.fault = hang_completions
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(backend.generate, PROMPTS, SAMPLING)
        server.wait_for(lambda: server.in_flight == 3)
        backend.close()
        with pytest.raises(BackendClosedError):
            future.result(30)
    server.wait_for(lambda: server.in_flight == 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("corelm-http")]


def test_abort_without_an_abort_route_closes_the_connection(
    connect: Connect, server: FaultServer, fake: FakeVLLM
) -> None:
    backend = connect()
    fake.fail_row(1, hang())
    before = len(server.requests)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(backend.generate, PROMPTS, SAMPLING, request_ids=["a", "b", "c"])
        # All three requests have arrived, and two have been answered.
        server.wait_for(lambda: len(server.requests) == before + 3 and server.in_flight == 1)
        backend.abort(["b"])
        result = future.result(30)
    assert result.finish_reasons == ("length", "abort", "length") and result.ids.lengths.tolist() == [4, 0, 4]
    server.wait_for(lambda: server.given_up == 1)
