"""Fixtures of the tests that need vLLM: its settings for a quick start on a CPU, a tiny model, and an engine on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read when vLLM is imported, here and in the processes it starts.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # For the sync mode; the other runs in a process of its own either way, and then has no second one.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
)

import pytest

import corelm
from corelm import Backend
from helpers.tiny_models import tiny_model, tiny_tokenizer
from vllm_backend import VLLMBackend
from vllm_backend.engine import AsyncEngine

#: What makes vLLM small, and exact.
SMALL: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}

Open = Callable[..., Backend]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_model(hidden_size=128)`` and its tokenizer in a folder. Its heads are of 32, the least that vLLM runs on a
    CPU.
    """
    folder = tmp_path_factory.mktemp("vllm") / "tiny"
    tiny_model(hidden_size=128).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def open_vllm(tiny_folder: Path) -> Open:
    """``open_vllm(**options)`` opens an engine in this process on the tiny model; whoever opens it closes it."""
    return lambda model=tiny_folder, **options: corelm.get_backend("vllm", model, **(SMALL | options))


@pytest.fixture(scope="session")
def shared(open_vllm: Open) -> Iterator[Backend]:
    """One asynchronous engine for all tests that leave it as it was: starting one takes long."""
    with open_vllm() as backend:
        yield backend


@pytest.fixture(scope="session")
def engine(shared: Backend) -> AsyncEngine:
    """What is behind `shared`."""
    plugin = shared.engine.plugin
    assert isinstance(plugin, VLLMBackend) and isinstance(plugin.engine, AsyncEngine)
    return plugin.engine
