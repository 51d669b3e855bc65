"""Fixtures of the transformers plugin's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from corelm.backend.backend import Backend
from helpers.tiny_models import DEVICE, tiny_tokenizer
from transformers_backend import TransformersBackend

Open = Callable[..., Backend]


@pytest.fixture(autouse=DEVICE != "cpu")
def compare_across_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let results on a GPU be compared with the oracle's, which are on the CPU."""
    monkeypatch.setattr(torch.testing, "assert_close", partial(torch.testing.assert_close, check_device=False))


@pytest.fixture
def fast() -> bool:
    """Whether `open_model` uses the accelerations. A test file that is about both overrides this with parameters."""
    return True


@pytest.fixture
def open_model(fast: bool) -> Iterator[Open]:
    """``open_model(model, **options)`` returns the plugin behind core's `Backend`; it is closed after the test.

    The tokenizer is the tiny one unless given.
    """
    with ExitStack() as stack:

        def make(model: Any, **options: Any) -> Backend:
            engine = TransformersBackend.open(model, **({"tokenizer": tiny_tokenizer(), "fast": fast} | options))
            return stack.enter_context(Backend.from_plugin(engine, "transformers"))

        yield make


@pytest.fixture
def narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles 1,024 entries wide for a single token already, so that a small test has several of them."""
    for name in ("_CPU_TILE", "_CPU_RANKED_TILE"):
        monkeypatch.setattr(f"transformers_backend.fast.tiles.{name}", (1, 1024))


@pytest.fixture
def short_answers_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make few rows too wide for a batch already: an answer without a limit counts four tokens when it begins."""
    monkeypatch.setattr("transformers_backend.decoding.EXPECTED_TOKENS", 4)
