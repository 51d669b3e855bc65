"""A selection of the conformance kit on a fleet of two toy engines in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from corelm import Backend
from corelm_fleet.fleet import FleetEngine
from corelm_fleet.replica import Member
from corelm_testing.toy import Bigram, ToyBackend
from helpers.selected_kit import SelectedKit
from helpers.toy_conformance import TABLE, ToyPromises


def open_toys() -> Backend:
    members = [Member(name, lambda: ToyBackend.open(Bigram(TABLE.clone()))) for name in ("one", "two")]
    return Backend.from_plugin(FleetEngine(members), "toys")


class TestFleetOfToys(ToyPromises, SelectedKit):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return open_toys
