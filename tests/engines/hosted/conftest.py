"""Real engines in processes of their own environments. This process has neither vLLM nor SGLang."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engines.sglang_on_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT
from helpers.tiny_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[3]

#: What each engine needs to run on a CPU: its interpreter, variables, and options. The engines' own tests use the same.
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {"python": str(ROOT / ".venv" / "bin" / "python"), "dtype": "float32"},
    "vllm": {
        "python": str(ROOT / ".venv-vllm" / "bin" / "python"),
        "env": {
            "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        },
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 26,
    },
    "sglang": {
        "python": str(ROOT / ".venv-sglang" / "bin" / "python"),
        "env": {
            # The launched server inherits these.
            **CPU_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(filter(None, [CPU_ENVIRONMENT["PYTHONPATH"], os.environ.get("PYTHONPATH")])),
        },
        "progress": False,
        **CPU_ARGUMENTS,
    },
}


@pytest.fixture(scope="session", autouse=True)
def no_engine_here() -> None:
    """Make sure that the tests show what they are about."""
    assert find_spec("vllm") is None and find_spec("sglang") is None


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model whose heads are large enough for vLLM on a CPU, and its tokenizer."""
    path = tmp_path_factory.mktemp("hosted") / "model"
    tiny_model(hidden_size=128).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
