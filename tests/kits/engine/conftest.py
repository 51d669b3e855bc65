"""Fixtures: an HTTP client, and a real server that misbehaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from helpers.http_clients import Connect, Waits, echo
from helpers.http_server import FaultServer

if TYPE_CHECKING:
    from corelm_engine_kit import HttpClient


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def connect(waits: Waits) -> Iterator[Connect]:
    """``connect(server, **options)``: a client that does not sleep. Closing it after the test must end its thread."""
    from corelm_engine_kit import HttpClient

    before = set(threading.enumerate())
    with ExitStack() as stack:

        def make(server: FaultServer | str, **options: Any) -> HttpClient:
            url = server if isinstance(server, str) else server.url
            client = HttpClient(url, **{"sleep": waits, **options})
            stack.callback(client.close)
            return client

        yield make
    left = {thread for thread in threading.enumerate() if thread.name.startswith("corelm-http")} - before
    assert not left


@pytest.fixture
def serve() -> Iterator[Callable[..., FaultServer]]:
    with ExitStack() as stack:
        yield lambda answer=echo, *first, **options: stack.enter_context(FaultServer(answer, *first, **options))
