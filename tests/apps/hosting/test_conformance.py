"""A selection of the conformance kit on the transformers plugin in another process of this interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import corelm
from corelm import Backend
from helpers.selected_kit import SelectedKit
from helpers.transformers_conformance import TransformersPromises


class TestHostedTransformers(TransformersPromises, SelectedKit):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folder: Path) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("transformers", folder, python=sys.executable)
