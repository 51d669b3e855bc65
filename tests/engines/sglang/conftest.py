"""Real SGLang servers for the tests of the plugin, on a CPU. A launch takes a minute, so tests share them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import corelm
from corelm import Backend
from helpers.tiny_models import CONTEXT, tiny_model, tiny_tokenizer
from sglang_backend import SGLangBackend
from sglang_backend.launch import LaunchedServer

HERE = Path(__file__).parent

#: What makes SGLang run on a CPU at all. None of it is the plugin's.
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "dtype": "float32",
    "skip_server_warmup": True,
    # Otherwise its scheduler keeps a core busy while it waits.
    "sleep_on_idle": True,
    "max_total_tokens": 65536,
    "mem_fraction_static": 0.3,
}
CPU_ENVIRONMENT = {
    "PYTHONPATH": str(HERE / "cpu"),
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # What is compiled takes longer to compile than to run.
    "TORCHDYNAMO_DISABLE": "1",
}

#: With these a server honours seeds.
SEEDS_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HERE / "cpu"), str(HERE / "cpu" / "seeds")])}
SEEDS_ARGUMENTS = {"enable_deterministic_inference": True}

Launch = Callable[..., Backend]


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """The oracle's own copy of the model that the servers load."""
    return tiny_model()


@pytest.fixture(scope="session")
def other_model() -> PreTrainedModel:
    """Other weights for the same model."""
    return tiny_model(seed=1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    return saved(model, tmp_path_factory.mktemp("sglang") / "model")


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory, other_model: PreTrainedModel) -> Path:
    return saved(other_model, tmp_path_factory.mktemp("sglang") / "other")


def saved(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def cpu() -> tuple[dict[str, str], dict[str, Any]]:
    """The environment and the arguments with which a server runs on a CPU."""
    return CPU_ENVIRONMENT, CPU_ARGUMENTS


@pytest.fixture(scope="session")
def launch(folder: Path) -> Launch:
    """``launch(env={}, **options)``: a server of its own for the model in `folder`. Whoever opens it closes it."""

    def opened(*, env: dict[str, str] | None = None, **options: Any) -> Backend:
        settings = CPU_ARGUMENTS | {"progress": False} | options
        return corelm.get_backend("sglang", folder, env=CPU_ENVIRONMENT | (env or {}), **settings)

    return opened


@pytest.fixture(scope="session")
def shared(launch: Launch) -> Iterator[Backend]:
    """One launched server for all tests that leave its weights alone."""
    with launch() as backend:
        yield backend


@pytest.fixture(scope="session")
def original(launch: Launch) -> Iterator[Backend]:
    """One that returns log-probs as they are before the temperature, and has room for the model's whole context."""
    env = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with launch(env=env, context_length=CONTEXT + 7) as backend:
        yield backend


@pytest.fixture(scope="session")
def seeded(launch: Launch) -> Iterator[Backend]:
    """One that honours seeds."""
    with launch(env=SEEDS_ENVIRONMENT, **SEEDS_ARGUMENTS) as backend:
        yield backend


@pytest.fixture(scope="session")
def connect() -> Iterator[Callable[..., Backend]]:
    """``connect(backend, **options)``: another backend for the server that `backend` has launched, through its URL."""
    with ExitStack() as stack:

        def opened(backend: Backend, **options: Any) -> Backend:
            server = server_of(backend)
            url = {"base_url": server.base_url, "api_key": server.api_key}
            return stack.enter_context(corelm.get_backend("sglang", **(url | options)))

        yield opened


def server_of(backend: Backend) -> LaunchedServer:
    engine = backend.engine.plugin
    assert isinstance(engine, SGLangBackend) and engine.launched is not None
    return engine.launched
