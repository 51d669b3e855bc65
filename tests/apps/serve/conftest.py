"""Backends and servers that the tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import corelm
from corelm import Backend
from corelm_serve import ServerThread
from helpers.serving import Seen, serving
from helpers.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def toy(seen: Seen) -> Iterator[Backend]:
    with corelm.get_backend("toy", wrappers=[seen]) as backend:
        yield backend


@pytest.fixture
def tiny(seen: Seen) -> Iterator[Backend]:
    """The transformers backend with a tiny random model."""
    with corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), wrappers=[seen]) as backend:
        yield backend


@pytest.fixture(params=["toy", "tiny"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def server(backend: Backend) -> Iterator[ServerThread]:
    with serving(backend, model_name="m") as made:
        yield made


@pytest.fixture
def toy_server(toy: Backend) -> Iterator[ServerThread]:
    with serving(toy, model_name="m") as made:
        yield made
