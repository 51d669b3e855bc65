"""Real SGLang servers on a CPU. A launch takes about a minute, so tests share servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import corelm
from corelm import Backend
from engines.sglang_on_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT, SEEDS_ARGUMENTS, SEEDS_ENVIRONMENT
from helpers.tiny_models import CONTEXT, tiny_model, tiny_tokenizer
from sglang_backend import SGLangBackend
from sglang_backend.launch import LaunchedServer

Launch = Callable[..., Backend]


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """The oracle's copy of the model that the servers load."""
    return tiny_model()


@pytest.fixture(scope="session")
def other_model() -> PreTrainedModel:
    """The same model with other weights."""
    return tiny_model(seed=1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    return _save(model, tmp_path_factory.mktemp("sglang") / "model")


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory, other_model: PreTrainedModel) -> Path:
    return _save(other_model, tmp_path_factory.mktemp("sglang") / "other")


def _save(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def cpu() -> tuple[dict[str, str], dict[str, Any]]:
    """The environment and the arguments of a server on a CPU."""
    return CPU_ENVIRONMENT, CPU_ARGUMENTS


@pytest.fixture(scope="session")
def launch(folder: Path) -> Launch:
    """``launch(env={}, **options)`` launches another server for the model in `folder`. The caller closes it."""

    def opened(*, env: dict[str, str] | None = None, **options: Any) -> Backend:
        settings = CPU_ARGUMENTS | {"progress": False} | options
        return corelm.get_backend("sglang", folder, env=CPU_ENVIRONMENT | (env or {}), **settings)

    return opened


@pytest.fixture(scope="session")
def shared(launch: Launch) -> Iterator[Backend]:
    """One launched server for all tests that do not change its weights."""
    with launch() as backend:
        yield backend


@pytest.fixture(scope="session")
def original(launch: Launch) -> Iterator[Backend]:
    """A server that returns log-probs from before the temperature, with room for the model's whole context."""
    env = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with launch(env=env, context_length=CONTEXT + 7) as backend:
        yield backend


@pytest.fixture(scope="session")
def seeded(launch: Launch) -> Iterator[Backend]:
    """A server that honours seeds."""
    with launch(env=SEEDS_ENVIRONMENT, **SEEDS_ARGUMENTS) as backend:
        yield backend


@pytest.fixture(scope="session")
def connect() -> Iterator[Callable[..., Backend]]:
    """``connect(backend, **options)`` opens another backend on the server that `backend` launched, by its URL."""
    with ExitStack() as stack:

        def opened(backend: Backend, **options: Any) -> Backend:
            server = _launched_server(backend)
            url = {"base_url": server.base_url, "api_key": server.api_key}
            return stack.enter_context(corelm.get_backend("sglang", **(url | options)))

        yield opened


def _launched_server(backend: Backend) -> LaunchedServer:
    engine = backend.engine.plugin
    assert isinstance(engine, SGLangBackend) and engine.launched is not None
    return engine.launched
