"""Fixtures of the tests that need vLLM: settings for a quick start on a CPU, a tiny model, and an engine on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# vLLM reads these when it is imported, here and in the processes that it starts.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Affects the synchronous mode only: the asynchronous one always has a process for its engine.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
)

import pytest

import corelm
from corelm import Backend
from engines.vllm.engine_access import async_engine
from helpers.tiny_models import tiny_model, tiny_tokenizer
from vllm_backend.engine_async import AsyncEngine

#: Engine arguments that keep vLLM small and exact.
SMALL: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}

Open = Callable[..., Backend]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``tiny_model(hidden_size=128)`` and its tokenizer. Its heads have size 32, the least that vLLM
    supports on a CPU.
    """
    folder = tmp_path_factory.mktemp("vllm") / "tiny"
    tiny_model(hidden_size=128).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def open_vllm(tiny_folder: Path) -> Open:
    """``open_vllm(**options)`` opens an engine in this process on the tiny model; the caller closes it."""
    return lambda model=tiny_folder, **options: corelm.get_backend("vllm", model, **(SMALL | options))


@pytest.fixture(scope="session")
def shared(open_vllm: Open) -> Iterator[Backend]:
    """One asynchronous engine for all tests that do not change it: starting one takes long."""
    with open_vllm() as backend:
        yield backend


@pytest.fixture(scope="session")
def engine(shared: Backend) -> AsyncEngine:
    """The plugin's engine behind `shared`."""
    return async_engine(shared)
