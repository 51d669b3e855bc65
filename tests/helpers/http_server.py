"""`FaultServer`: a small real HTTP server on a thread of this process, which fails on demand.

A reply is a function that writes to the connection. `json_reply` makes a correct reply; `truncated`, `reset` and `hang`
make faulty ones.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: Seconds after which a wait for the server fails the test.
PATIENCE = 30.0


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


Reply = Callable[["_Handler"], None]


def json_reply(payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return raw(json.dumps(payload).encode(), status, headers)


def raw(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    def write(handler: _Handler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return write


def event_stream(events: Iterable[Any], *, ends: bool = True) -> Reply:
    """Send each event as it comes, and "[DONE]" at last unless `ends` is False; then close the connection."""

    def write(handler: _Handler) -> None:
        handler.close_connection = True
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.end_headers()
        for event in events:
            handler.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            handler.wfile.flush()
        if ends:
            handler.wfile.write(b"data: [DONE]\n\n")

    return write


def truncated(payload: Any) -> Reply:
    """Send half of the announced body, then close the connection."""
    body = json.dumps(payload).encode()

    def write(handler: _Handler) -> None:
        raw(body[: len(body) // 2], headers={"Content-Length": str(len(body))})(handler)
        handler.close_connection = True

    return write


def reset() -> Reply:
    """Reset the connection without a reply."""

    def write(handler: _Handler) -> None:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()
        handler.close_connection = True

    return write


def hang() -> Reply:
    """Send nothing until the client gives up, which is counted, or the server stops."""

    def write(handler: _Handler) -> None:
        handler.close_connection = True
        if handler.faults.waits_for_client(handler.connection):
            handler.faults.note(given_up=1)

    return write


def drip() -> Reply:
    """Send a body of blanks, one every 10 ms, until the client leaves."""

    def write(handler: _Handler) -> None:
        handler.close_connection = True
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            handler.wfile.write(b" ")
            time.sleep(0.01)

    return write


def held(reply: Reply, gate: threading.Event) -> Reply:
    """Send `reply` once the gate is open."""

    def write(handler: _Handler) -> None:
        assert gate.wait(PATIENCE)
        reply(handler)

    return write


class FaultServer:
    """A server that answers with `answer(request)`, after one reply of `first` for each of the first requests.

    Attributes:
        requests: all requests, in order of arrival.
        in_flight: how many requests are being answered now.
        peak: the largest value of `in_flight`.
        given_up: how many hanging requests the client gave up.
    """

    def __init__(self, answer: Callable[[Request], Reply], *first: Reply, port: int = 0) -> None:
        self.answer = answer
        self.first = list(first)
        self.requests: list[Request] = []
        self.in_flight = self.peak = self.given_up = 0
        self._changed = threading.Condition()
        self._stop, self._stopped = socket.socketpair()
        handler = type("Handler", (_Handler,), {"faults": self})
        self._server = _Server(("127.0.0.1", port), handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="fault-server")
        self._thread.start()

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._stopped.close()

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Speak TLS on connections from now on."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), "the server did not reach the expected state"

    def note(self, **counts: int) -> None:
        with self._changed:
            for name, more in counts.items():
                setattr(self, name, getattr(self, name) + more)
            self.peak = max(self.peak, self.in_flight)
            self._changed.notify_all()

    def waits_for_client(self, connection: socket.socket) -> bool:
        """Wait; return True once the client closes the connection, False once the server stops."""
        ready, _, _ = select.select([connection, self._stopped], [], [])
        return self._stopped not in ready

    @contextmanager
    def serving(self, request: Request) -> Iterator[Reply]:
        with self._changed:
            self.requests.append(request)
            reply = self.first.pop(0) if self.first else None
        self.note(in_flight=1)
        try:
            yield reply or self.answer(request)
        finally:
            self.note(in_flight=-1)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: these tests close connections on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: FaultServer

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, dict(self.headers), json.loads(body) if body else None)
        with self.faults.serving(request) as reply:
            reply(self)

    do_GET = do_POST = _serve

    def log_message(self, format: str, *args: Any) -> None:
        pass
