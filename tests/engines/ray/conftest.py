"""A Ray of this machine for all tests, and backends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm import Backend
from helpers import tiny_models
from helpers.processes import wait_until
from ray_backend.cluster import CLUSTER

Open = Callable[..., Backend]


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    """Keep Ray running between the tests."""
    CLUSTER.enter(None, "corelm")
    yield
    CLUSTER.leave()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    folder = tmp_path_factory.mktemp("model")
    tiny_models.tiny_model().save_pretrained(folder)
    tiny_models.tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def open_toys() -> Iterator[Open]:
    """``open_toys(**options)`` opens the toy engine in actors; the backend is closed after the test."""
    opened: list[Backend] = []

    def open_it(**options: Any) -> Backend:
        opened.append(corelm.get_backend("ray", **{"inner": "toy", "num_cpus": 0.1} | options))
        return opened[-1]

    yield open_it
    for backend in opened:
        backend.close()


def states(backend: Backend) -> set[str]:
    return {each.state for each in backend.engine.plugin.status()}


def await_healthy(backend: Backend) -> None:
    """Wait until every replica serves again."""
    assert wait_until(lambda: states(backend) == {"healthy"}, 120), backend.engine.plugin.status()
