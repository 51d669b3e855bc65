"""The transformers backend passes the conformance suite, fast and plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

import corelm
from corelm import Backend
from corelm.testing.adapters import AdapterPromises
from corelm.testing.in_flight import InFlightPromises
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.transformers_conformance import TransformersConformance, TransformersPromises


class TestFast(TransformersConformance):
    fast: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), fast=cls.fast)


class TestPlain(TestFast):
    fast = False


class TestRecomputing(TransformersPromises, InFlightPromises):
    """After an update in flight, the KV cache is computed anew, so tokens are those of the new weights alone."""

    recomputes_in_flight = True

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return lambda: corelm.get_backend(
            "transformers", tiny_model(), tokenizer=tiny_tokenizer(), recompute_kv_on_update=True
        )


class TestAdapters(TransformersPromises, AdapterPromises):
    """A model that was loaded here takes adapters; those of a model object belong to its owner."""

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folder: Path) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("transformers", folder, dtype="float32")
