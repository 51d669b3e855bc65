"""The conformance kit on a real `transformers serve`: it takes text, returns text, and knows no log-probs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

import corelm
from corelm import Backend
from corelm.testing import BackendConformance
from helpers.letters import letter_model, letters
from helpers.oracle_kit import OracleKit
from helpers.transformers_server import ENDLESS, TransformersServer


class TestTransformersServe(OracleKit, BackendConformance):
    """Nothing ends an answer here, so that the kit can ask for answers of every length."""

    model: ClassVar[nn.Module] = letter_model(ends=False)
    # Each answer is an HTTP request of its own.
    draws = 300

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folders: dict[bool, Path], transformers_server: TransformersServer) -> Callable[[], Backend]:
        options: dict[str, Any] = {"base_url": transformers_server.url, "tokenizer": folders[False]}
        options |= {"extra_body": ENDLESS, "eos_token_ids": (), "max_context": 512}
        return partial(corelm.get_backend, "openai", str(folders[False]), **options)

    def rows(self, backend: Backend, *lengths: int, seed: int = 0) -> list[list[int]]:
        """Return rows of letters: the server takes text, so no row may hold a part of a character."""
        generator = random.Random(seed)
        return [generator.choices(letters(), k=length) for length in lengths]
