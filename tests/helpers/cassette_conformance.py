"""The conformance kit on transformers while it is recorded, and then on the replay.

tests/kits/testing/test_cassette_conformance.py runs this file in another process: the replay needs the whole recording,
and the tests of a file may be divided among processes. ``CASSETTES`` is the folder of the cassettes: one for each
backend that the kit opens, in that order. Seeds that a test draws from torch's generator are drawn again at replay,
because every test starts from a seed that follows from its name.
"""

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import corelm
from corelm import Backend
from corelm_testing.cassette import CassetteRecorder
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.transformers_conformance import TransformersConformance

FOLDER = Path(os.environ.get("CASSETTES", ""))


class _OfCassettes:
    opened: ClassVar[int] = 0

    @pytest.fixture(autouse=True)
    def same_seeds(self, request: pytest.FixtureRequest) -> None:
        torch.manual_seed(zlib.crc32(request.node.name.encode()))

    @classmethod
    def next_path(cls) -> Path:
        cls.opened += 1
        return FOLDER / str(cls.opened)


class TestRecorded(_OfCassettes, TransformersConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[..., Backend]:
        def open_it(**options: Any) -> Backend:
            recorder = CassetteRecorder(cls.next_path())
            return corelm.get_backend(
                "transformers", tiny_model(), tokenizer=tiny_tokenizer(), wrappers=[recorder], **options
            )

        return open_it


class TestReplayed(_OfCassettes, TransformersConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("cassette", cls.next_path(), tokenizer=tiny_tokenizer())
