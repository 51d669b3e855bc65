"""The conformance kit on the transformers plugin in an actor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import corelm
from corelm import Backend
from helpers.transformers_conformance import TransformersConformance


class TestTransformersInAnActor(TransformersConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folder: Path) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("ray", folder, inner="transformers", num_cpus=0.2)
