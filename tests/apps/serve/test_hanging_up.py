"""Clients that hang up: the engine is told, and what it had sampled by then is recorded."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import pytest
from starlette.types import Message

from corelm import Backend
from corelm_serve import ServerThread
from corelm_serve.connection import Connection
from helpers.processes import wait_until
from helpers.serving import TIMEOUT, http_of, raw_request, serving
from helpers.streaming_fakes import dripping, engine_of

ASKED = {"prompt": [3, 7], "max_tokens": 8}


def read_events(sock: Any, count: int) -> bytes:
    data = b""
    while data.count(b"data: ") < count:
        part = sock.recv(65536)
        assert part, data
        data += part
    return data


def answers(server: ServerThread) -> list[dict[str, Any]]:
    """Return the recorded answers of all sessions."""
    assert server.sessions is not None
    nodes = [node for name in server.sessions.ids() for node in server.sessions.to_json(name)["nodes"]]
    return [node for node in nodes if node["kind"] == "answer"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_can_abort_is_told_and_the_partial_answer_is_recorded(stream: bool) -> None:
    backend = dripping(3, abort=True)
    with backend, serving(backend, model_name="m") as server:
        sock = raw_request(server, "/v1/completions", {**ASKED, "stream": stream})
        engine_of(backend).wait_for_calls(1)
        if stream:
            read_events(sock, 3)
        else:
            assert wait_until(lambda: engine_of(backend).taken == 3)
        sock.close()
        assert wait_until(lambda: bool(answers(server)))
        (answer,) = answers(server)
        assert engine_of(backend).aborted == set(engine_of(backend).calls[0].request_ids)
        assert answer["finish_reason"] == "abort" and answer["token_ids"] == [7] * 3
        assert answer["log_probs"] == [-0.0, -1.0, -2.0] and answer["provenance"]["mode"] == "raw"
        assert wait_until(lambda: server.service.admitted_now == 0)
        engine_of(backend).allow(None)
        with http_of(server) as client:
            assert client.post("/v1/completions", json=ASKED).json()["choices"][0]["finish_reason"] == "length"


def test_an_engine_that_cannot_abort_finishes_a_stream_and_the_whole_answer_is_recorded() -> None:
    backend = dripping(3)
    with backend, serving(backend, model_name="m") as server:
        sock = raw_request(server, "/v1/completions", {**ASKED, "stream": True})
        read_events(sock, 3)
        sock.close()
        engine_of(backend).allow(None)
        assert wait_until(lambda: bool(answers(server)))
        (answer,) = answers(server)
    assert answer["finish_reason"] == "length" and answer["token_ids"] == [7] * 8


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_waits_leaves_the_queue(stream: bool) -> None:
    backend = dripping(1)
    with backend, serving(backend, model_name="m") as server:
        first = raw_request(server, "/v1/completions", ASKED)
        engine_of(backend).wait_for_calls(1)
        second = raw_request(server, "/v1/completions", {**ASKED, "stream": stream})
        assert wait_until(lambda: server.service.backend.state().queued == 1)
        second.close()
        assert wait_until(lambda: server.service.backend.state().queued == 0)
        engine_of(backend).allow(None)
        assert first.recv(65536).startswith(b"HTTP/1.1 200")
        first.close()
        assert wait_until(lambda: server.service.admitted_now == 0)
        assert len(engine_of(backend).calls) == 1 and len(answers(server)) == 1


@pytest.mark.parametrize("abort", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_ends_says_so_to_its_clients(abort: bool, stream: bool) -> None:
    backend, rest = dripping(2, abort=abort), b""
    with backend, serving(backend, model_name="m") as server:
        sock = raw_request(server, "/v1/completions", {**ASKED, "stream": stream})
        engine_of(backend).wait_for_calls(1)
        if stream:
            read_events(sock, 2)
        ending = threading.Thread(target=server.close)
        ending.start()
        while part := sock.recv(65536):
            rest += part
        sock.close()
        # The other engine finishes its call.
        engine_of(backend).allow(None)
        ending.join()
    assert b"the server is shutting down" in rest
    if not stream:
        assert rest.startswith(b"HTTP/1.1 503")
    else:
        assert json.loads(rest.rpartition(b"data: ")[2].split(b"\n")[0])["error"]["code"] == "closed"


def test_a_client_that_hangs_up_before_its_body_is_complete_leaves_nothing(toy: Backend) -> None:
    with serving(toy, model_name="m") as server:
        sock = raw_request(server, "/v1/completions", ASKED)
        sock.close()
        host, port = server.url.removeprefix("http://").split(":")
        half = socket.create_connection((host, int(port)))
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer "
            + server.api_key.encode()
            + b"\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        half.close()
        assert wait_until(lambda: server.service.admitted_now == 0)


@pytest.mark.parametrize("begins", [True, False])
def test_a_client_that_does_not_read_is_given_up(begins: bool) -> None:
    """Uvicorn lets the beginning of a reply wait too, while the client has not read the reply before it."""
    sent, gone = [], asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if message["type"].endswith("start") == begins:
            await gone.wait()

    async def receive() -> Message:
        raise AssertionError("the reply does not read")

    async def reply() -> bool:
        connection = Connection({"type": "http", "headers": []}, receive, send, send_timeout=0.01)
        await asyncio.wait_for(connection.reply({}), TIMEOUT)
        return connection.left

    assert asyncio.run(reply())
    assert sent == ["http.response.start", "http.response.body"][: 1 if begins else 2]
