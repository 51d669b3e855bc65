"""The conformance kit on transformers while it is recorded, and then on the replay.

tests/kits/testing/test_cassette_conformance.py runs this file in another process: the replay needs the whole recording,
and the tests of a file may be divided among processes. ``CASSETTES`` is the folder of the cassettes.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm import Backend
from helpers.cassette_kit import OfCassettes
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.transformers_conformance import TransformersConformance


def _open(**options: Any) -> Backend:
    return corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), **options)


class TestRecorded(OfCassettes, TransformersConformance):
    folder = Path(os.environ.get("CASSETTES", ""))

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[..., Backend]:
        return cls.opening_recorded(_open)


class TestReplayed(OfCassettes, TransformersConformance):
    folder = TestRecorded.folder

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return cls.opening_replays(tokenizer=tiny_tokenizer())
