"""Fixtures of the transformers plugin's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from corelm.backend.backend import Backend
from helpers.tiny_models import tiny_tokenizer
from transformers_backend import TransformersBackend

Open = Callable[..., Backend]


@pytest.fixture
def open_model() -> Iterator[Open]:
    """``open_model(model, **options)``: the plugin behind core's façade, with the tiny tokenizer; closed afterwards."""
    with ExitStack() as stack:

        def make(model: Any, **options: Any) -> Backend:
            engine = TransformersBackend.open(model, **({"tokenizer": tiny_tokenizer()} | options))
            return stack.enter_context(Backend.from_plugin(engine, "transformers"))

        yield make
