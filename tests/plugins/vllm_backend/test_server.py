"""The server fails for one row, for all of them, or for a moment; calls time out, are aborted or closed."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from corelm.errors import BackendTimeoutError, EngineError
from helpers.fake_vllm import PROMPTS, SAMPLING, Connect, FakeVLLM
from helpers.http_server import FaultServer, Reply, Request, hang, held, json_reply
from helpers.processes import wait_until


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
    fake.fault = lambda request: hang() if request.path == "/v1/completions" else None
    for call in (
        lambda: backend.generate(PROMPTS, SAMPLING, timeout=0.3),
        lambda: backend.score_logprobs([[*prompt, 3] for prompt in PROMPTS], timeout=0.3),
    ):
        with pytest.raises(BackendTimeoutError):
            call()
    server.wait_for(lambda: server.in_flight == 0)
    fake.fault = lambda request: None
    assert backend.generate(PROMPTS, SAMPLING).finish_reasons == ("length",) * 3


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
