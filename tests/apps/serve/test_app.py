"""The ASGI application in a server that is not ours."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx2
import pytest
import uvicorn
from starlette.testclient import TestClient

import corelm
from corelm import Backend, hookimpl
from corelm.errors import EngineError
from corelm.spec import HealthRequest
from corelm_serve import ServerOptions, ServingApp
from corelm_serve.server import listening, run_server
from helpers.serving import TIMEOUT


def test_no_thread_is_left_when_the_server_ends_and_the_backend_stays_open(toy: Backend) -> None:
    before = set(threading.enumerate())
    with TestClient(ServingApp(toy, ServerOptions(api_key="k")), headers={"authorization": "Bearer k"}) as client:
        assert client.post("/v1/completions", json={"prompt": [65], "max_tokens": 2}).status_code == 200
        assert set(threading.enumerate()) - before
    left = [each for each in set(threading.enumerate()) - before if each.is_alive()]
    assert not left, left
    assert toy.health()


def test_no_thread_is_left_if_the_requests_cannot_be_ended(toy: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails() -> None:
        raise RuntimeError("cannot end")

    before = set(threading.enumerate())
    app = ServingApp(toy, ServerOptions(api_key="k"))
    monkeypatch.setattr(app.service, "end", fails)
    with (
        pytest.raises(RuntimeError, match="cannot end"),
        TestClient(app, headers={"authorization": "Bearer k"}) as client,
    ):
        assert client.post("/v1/completions", json={"prompt": [65], "max_tokens": 2}).status_code == 200
        assert set(threading.enumerate()) - before
    left = [each for each in set(threading.enumerate()) - before if each.is_alive()]
    assert not left, left


def test_an_application_that_does_not_start_is_not_announced(toy: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    async def returns(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        self.should_exit = True  # as uvicorn 0.34 does, while newer ones exit

    monkeypatch.setattr(uvicorn.Server, "startup", returns)
    announced: list[bool] = []
    with pytest.raises(EngineError, match="the application did not start"):
        run_server(ServingApp(toy, ServerOptions()), listening("127.0.0.1", 0), lambda: announced.append(True))
    assert not announced


def test_a_hanging_engine_that_many_ask_for_its_health_answers_requests_meanwhile() -> None:
    gate, asked = threading.Event(), []

    class Hangs:
        @hookimpl
        def health(self, request: HealthRequest) -> bool:
            asked.append(request)
            assert gate.wait(TIMEOUT)
            return True

    async def crowd(app: ServingApp) -> tuple[int, set[int]]:
        headers = {"authorization": "Bearer k"}
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            looks = [asyncio.create_task(client.get("/health")) for _ in range(100)]
            try:
                body = {"prompt": [65], "max_tokens": 2}
                answer = await asyncio.wait_for(client.post("/v1/completions", json=body), TIMEOUT / 4)
            finally:
                gate.set()
            return answer.status_code, {each.status_code for each in await asyncio.gather(*looks)}

    with corelm.get_backend("toy", wrappers=[Hangs()]) as backend:
        app = ServingApp(backend, ServerOptions(api_key="k"))
        assert asyncio.run(crowd(app)) == (200, {200}) and len(asked) == 1
        app.service.backend.cleanup()


def test_metrics_say_what_waits_and_runs_and_how_fast(toy: Backend) -> None:
    app = ServingApp(toy, ServerOptions(api_key="k"))
    with TestClient(app, headers={"authorization": "Bearer k"}) as client:
        for body in ({"prompt": [65], "max_tokens": 3}, {"prompt": [65], "max_tokens": 3, "stream": True}):
            assert client.post("/v1/completions", json=body).status_code == 200
        text = client.get("/metrics").text
        told = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
        assert int(told["corelm_sampled_tokens_total"]) > 3
        assert float(told["corelm_tokens_per_second"]) == int(told["corelm_sampled_tokens_total"]) / 60
        assert told["corelm_calls_waiting"] == told["corelm_calls_running"] == told["corelm_requests"] == "0"
        assert client.get("/metrics", headers={"authorization": ""}).status_code == 401
