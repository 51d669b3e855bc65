"""The conformance kit on a fleet of two transformers engines, each in its own process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import corelm
from corelm import Backend
from helpers.transformers_conformance import TransformersConformance


class TestFleetOfHostedTransformers(TransformersConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folder: Path) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("transformers", folder, python=sys.executable, replicas=2)
