"""Real SGLang servers on a CPU. A launch takes about a minute, so tests share servers."""

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

#: SGLang needs these arguments and variables to run on a CPU. The plugin itself sets none of them.
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "dtype": "float32",
    "skip_server_warmup": True,
    # Otherwise the idle scheduler keeps a core busy.
    "sleep_on_idle": True,
    "max_total_tokens": 65536,
    "mem_fraction_static": 0.3,
}
CPU_ENVIRONMENT = {
    "PYTHONPATH": str(HERE / "cpu"),
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # For a tiny model, compiling takes longer than running.
    "TORCHDYNAMO_DISABLE": "1",
}

#: A server that is started with these honours seeds.
SEEDS_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HERE / "cpu"), str(HERE / "cpu" / "seeds")])}
SEEDS_ARGUMENTS = {"enable_deterministic_inference": True}

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
