"""The transformers backend passes the conformance suite, fast and plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import corelm
from corelm import Backend
from corelm_testing.weights import InFlightPromises
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.transformers_conformance import TransformersConformance, TransformersPromises


class TestFast(TransformersConformance):
    """A model that was loaded here takes adapters and sleeps; a model object belongs to its owner."""

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folder: Path) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("transformers", folder, dtype="float32")


@pytest.mark.nightly
class TestPlain(TransformersConformance):
    """A model object, without accelerations."""

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), fast=False)


@pytest.mark.nightly
class TestRecomputing(TransformersPromises, InFlightPromises):
    """After an update in flight, the KV cache is computed anew, so tokens are those of the new weights alone."""

    recomputes_in_flight = True

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return lambda: corelm.get_backend(
            "transformers", tiny_model(), tokenizer=tiny_tokenizer(), recompute_kv_on_update=True
        )
