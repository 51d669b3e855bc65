"""The conformance kit on the transformers plugin in an actor, and in two.

With two actors only the tests run that a fleet could break. ``CORELM_FLEET_KIT=1`` runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import corelm
from corelm import Backend
from helpers.fleet_kit import FleetKit
from helpers.transformers_conformance import TransformersConformance, TransformersPromises


class TestTransformersInAnActor(TransformersConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folder: Path) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("ray", folder, inner="transformers", num_cpus=0.2)


@pytest.mark.thorough
class TestTransformersInTwoActors(TransformersPromises, FleetKit):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folder: Path) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("ray", folder, inner="transformers", replicas=2, num_cpus=0.2)
