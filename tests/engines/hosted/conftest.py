"""Real engines in processes of their own environments. This process has neither vLLM nor SGLang."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.tiny_models import tiny_model, tiny_tokenizer


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
