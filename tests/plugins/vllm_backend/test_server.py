"""The server fails for one row, for all of them, or for a moment; calls time out, are aborted or closed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from corelm.errors import BackendClosedError, BackendTimeoutError, EngineError
from helpers.each import case
from helpers.fake_vllm import PROMPTS, SAMPLING, Connect, FakeVLLM
from helpers.http_server import FaultServer, Reply, Request, hang, held, json_reply, raw, reset
from helpers.processes import wait_until

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


def test_a_transient_failure_does_not_change_the_result(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect(max_retries=2)
    for fault in TRANSIENT:
        with case(fault):
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


@pytest.mark.parametrize(("device", "lora", "alone"), [("cpu", {}, True), ("cpu", None, False), ("cuda", {}, False)])
def test_a_cpu_server_with_lora_is_sent_one_row_to_score_at_a_time(
    connect: Connect, fake: FakeVLLM, server: FaultServer, device: str, lora: Any, alone: bool
) -> None:
    """Of two, vLLM 0.32 dies where the head takes adapters."""
    fake.pages["/openapi.json"]["paths"]["/server_info"] = {}
    running = {"device_config": {"device": device}, "lora_config": lora}
    fake.pages["/server_info?config_format=json"] = {"vllm_config": running}
    backend = connect()
    assert backend.capabilities.concurrent_calls is not alone
    rows = [[5, 17, 300], [8, 9, 10, 11], [40, 41, 42]]
    expected = backend.score_logprobs(rows).logprobs.values.tolist()
    with_others: list[bool] = []

    def wait_for_others(request: Request) -> Reply | None:
        if request.path == "/v1/completions":
            with_others.append(wait_until(lambda: server.in_flight > 1, 0.2))
        return None

    fake.fault = wait_for_others
    assert backend.score_logprobs(rows).logprobs.values.tolist() == expected
    assert any(with_others) is not alone
    backend.generate(PROMPTS, SAMPLING)
    assert any(with_others[len(rows) :])


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
    with pytest.raises(EngineError):
        backend.generate(PROMPTS, SAMPLING, on_error="skip")
    assert not backend.health()


def fail_completions(reply: Reply) -> Callable[[Request], Reply | None]:
    return lambda request: reply if request.path == "/v1/completions" else None


@pytest.mark.parametrize("reply", [json_reply({"error": {"message": "it broke"}}, 500), reset()], ids=["500", "reset"])
def test_a_prompt_that_always_fails_is_a_failure_of_its_row_also_if_it_is_the_only_one(
    connect: Connect, fake: FakeVLLM, reply: Reply
) -> None:
    backend = connect(max_retries=0)
    fake.fault = fail_completions(reply)
    for prompts in (PROMPTS[:1], PROMPTS):
        result = backend.generate(prompts, SAMPLING, on_error="skip")
        assert set(result.finish_reasons) == {"error"} and result.errors is not None and all(result.errors)
        result = backend.score_logprobs([[*prompt, 3] for prompt in prompts], on_error="skip")
        assert result.errors is not None and all(result.errors)
    with pytest.raises(EngineError) as caught:
        backend.generate(PROMPTS[:1], SAMPLING)
    assert caught.value.rows == (0,) and caught.value.usable


def test_a_refused_key_fails_the_call_and_not_its_rows(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect(max_retries=0)
    fake.fault = fail_completions(json_reply({"error": "Unauthorized"}, 401))
    with pytest.raises(EngineError):
        backend.generate(PROMPTS, SAMPLING, on_error="skip")


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_fails_the_call_and_not_its_rows(connect: Connect, fake: FakeVLLM, status: int) -> None:
    backend = connect(max_retries=0)
    fake.fault = fail_completions(json_reply({"error": "later"}, status))
    with pytest.raises(EngineError, match=str(status)):
        backend.generate(PROMPTS, SAMPLING, on_error="skip")
    assert backend.health()


def test_asking_for_the_servers_health_does_not_outlast_the_timeout(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect(max_retries=0)
    fake.fault = lambda request: hang() if request.path == "/health" else json_reply({}, 500)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(backend.generate, PROMPTS, SAMPLING, on_error="skip", timeout=1.0)
        # The time may be over while the server is asked. The server hangs for longer than the test waits.
        with pytest.raises((EngineError, BackendTimeoutError)):
            future.result(60)


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


def test_calls_with_the_same_request_ids_have_other_ids_at_the_server(connect: Connect, server: FaultServer) -> None:
    backend = connect()
    before = len(server.requests)
    for _ in range(2):
        backend.generate(PROMPTS, SAMPLING, request_ids=["p0", "p1", "p2"])
    assert len({request.body["request_id"] for request in server.requests[before:]}) == 6


def test_an_abort_of_requests_that_have_ended_tells_the_server_nothing(
    connect: Connect, server: FaultServer, fake: FakeVLLM
) -> None:
    """An empty list of ids would abort every request of the server."""
    fake.pages["/openapi.json"]["paths"]["/abort_requests"] = {}
    backend = connect()
    backend.generate(PROMPTS, SAMPLING, request_ids=["a", "b", "c"])
    backend.abort(["a", "b"])
    assert "/abort_requests" not in server.paths()


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


def test_an_aborted_answer_is_waited_for_and_kept(
    connect: Connect, server: FaultServer, fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corelm_engine_kit.http._ABORT_REMINDER", 0.01)
    fake.pages["/openapi.json"]["paths"]["/abort_requests"] = {}
    backend, gate = connect(), threading.Event()
    told: list[list[str]] = []
    sent: list[Any] = []

    def fault(request: Request) -> Reply | None:
        if request.path == "/abort_requests":
            told.append(request.body["request_ids"])
            # A server on a busy machine: it answers the abort at once, and ends the request much later.
            if len(told) == 5:
                gate.set()
            return json_reply({})
        if request.method == "POST" and request.body["prompt"] == PROMPTS[1]:
            sent.append(request.body["request_id"])
            choice = {
                "finish_reason": "abort",
                "token_ids": [7, 8],
                "logprobs": {"tokens": ["token_id:7", "token_id:8"]},
            }
            choice["logprobs"]["token_logprobs"] = [-1.0, -2.0]
            return held(json_reply({"id": f"cmpl-{sent[0]}", "choices": [choice]}), gate)
        return None

    fake.fault = fault
    before = len(server.requests)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(backend.generate, PROMPTS, SAMPLING, request_ids=["a", "b", "c"])
        # Not `sent`: the server appends to it after its last notification.
        server.wait_for(lambda: len(server.requests) == before + 3 and server.in_flight == 1)
        backend.abort(["b"])
        result = future.result(30)
    assert result.finish_reasons == ("length", "abort", "length") and result.ids.tolist()[1] == [7, 8]
    assert result.logprobs is not None and result.logprobs.tolist()[1] == [-1.0, -2.0]
    # A reminder may be on its way when the answer arrives.
    assert len(told) >= 5 and all(ids == [f"cmpl-{sent[0]}-0"] for ids in told)


def test_an_abort_reaches_every_process_of_a_server(
    connect: Connect, server: FaultServer, fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vllm serve --data-parallel-size 4` has four API processes. Each connection belongs to one, at random, and an
    abort ends only the requests of the process that it reaches."""
    monkeypatch.setattr("corelm_engine_kit.http._ABORT_REMINDER", 0.01)
    fake.pages["/openapi.json"]["paths"]["/abort_requests"] = {}
    backend, stream, lock = connect(), random.Random(0), threading.Lock()
    processes: list[dict[str, threading.Event]] = [{} for _ in range(4)]

    def fault(request: Request) -> Reply | None:
        with lock:
            process = stream.choice(processes)
            if request.path == "/abort_requests":
                for name in request.body["request_ids"]:
                    if name in process:
                        process[name].set()
                return json_reply({})
            if request.method != "POST":
                return None
            name = f"cmpl-{request.body['request_id']}"
            gate = process[f"{name}-0"] = threading.Event()
        choice: dict[str, Any] = {
            "finish_reason": "abort",
            "token_ids": [7, 8],
            "logprobs": {"tokens": ["token_id:7", "token_id:8"]},
        }
        choice["logprobs"]["token_logprobs"] = [-1.0, -2.0]
        return held(json_reply({"id": name, "choices": [choice]}), gate)

    fake.fault = fault
    names = [str(row) for row in range(16)]
    before = len(server.requests)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(backend.generate, [PROMPTS[0]] * 16, SAMPLING, request_ids=names)
        server.wait_for(lambda: len(server.requests) == before + 16 and server.in_flight == 16)
        assert all(processes)
        backend.abort(names)
        result = future.result(30)
    assert result.finish_reasons == ("abort",) * 16 and result.ids.tolist() == [[7, 8]] * 16
    assert server.paths().count("/abort_requests") > 1
