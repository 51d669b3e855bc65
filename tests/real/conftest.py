"""A trained model: its folder, its plain forward and a backend on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import corelm
from corelm import Backend
from helpers.real_checks import Rows, plain_model, rows_of
from helpers.real_model import real_model


@pytest.fixture(scope="session")
def folder() -> Path:
    return real_model()


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def rows(tokenizer: Any) -> Rows:
    """The ids of all prompts."""
    return rows_of(tokenizer)


@pytest.fixture(scope="session")
def model(folder: Path) -> Any:
    """The model for plain forwards. Nothing changes it."""
    return plain_model(folder)


@pytest.fixture
def copy(folder: Path) -> Any:
    """A model that a test may change."""
    return plain_model(folder)


@pytest.fixture(scope="session")
def backend(folder: Path) -> Iterator[Backend]:
    with corelm.get_backend("transformers", folder, dtype="float32") as opened:
        yield opened
