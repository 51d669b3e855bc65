"""A selection of the conformance kit on the transformers plugin in an actor, and in two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import corelm
from corelm import Backend
from helpers.selected_kit import SelectedKit
from helpers.transformers_conformance import TransformersPromises


class TestTransformersInAnActor(TransformersPromises, SelectedKit):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folder: Path) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("ray", folder, inner="transformers", num_cpus=0.2)


@pytest.mark.nightly
class TestTransformersInTwoActors(TransformersPromises, SelectedKit):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folder: Path) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("ray", folder, inner="transformers", replicas=2, num_cpus=0.2)
