"""Fixtures: a fake vLLM server, and the backend connected to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import corelm
from corelm import Backend
from helpers.fake_vllm import VOCAB, FakeVLLM
from helpers.http_server import FaultServer
from helpers.tiny_models import tiny_tokenizer


@pytest.fixture
def fake() -> FakeVLLM:
    return FakeVLLM()


@pytest.fixture
def server(fake: FakeVLLM) -> Iterator[FaultServer]:
    with FaultServer(fake) as running:
        yield running


@pytest.fixture
def connect(server: FaultServer) -> Iterator[Callable[..., Backend]]:
    """``connect(**options)`` opens the backend on the fake server. The fixture closes it."""
    with ExitStack() as stack:

        def make(**options: Any) -> Backend:
            options = {"tokenizer": tiny_tokenizer(), "vocab_size": VOCAB, **options}
            return stack.enter_context(corelm.get_backend("vllm", base_url=server.url, **options))

        yield make
