"""A cassette of the real vLLM: a selection of the conformance kit records it, and then passes on the replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from corelm import Backend
from engines.vllm.test_conformance import InProcessPromises
from helpers.cassette_kit import OfCassettes
from helpers.selected_kit import SelectedKit

#: Tests that draw seeds on several threads at once, end calls in their midst, or measure how long they take: what they
#: ask for, or when, differs in every run. All others that passed on vLLM must pass on its replay.
NOT_REPLAYED = {
    "test_eight_threads_at_once_each_get_their_own_answers",
    "test_a_timeout_ends_the_wait_and_the_engine_if_it_declares_so",
}


@pytest.fixture(scope="module")
def cassettes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cassettes")


class TestRecorded(OfCassettes, InProcessPromises, SelectedKit):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, open_vllm: Callable[..., Backend], cassettes: Path) -> Callable[..., Backend]:
        cls.folder = cassettes
        return cls.opening_recorded(open_vllm)


class TestReplayed(OfCassettes, InProcessPromises, SelectedKit):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, cassettes: Path) -> Callable[[], Backend]:
        if not any(cassettes.iterdir()):
            pytest.skip("TestRecorded records what is replayed here; run the whole file")
        cls.folder = cassettes
        return cls.opening_replays()


def test_what_passed_on_vllm_passes_on_its_replay(request: pytest.FixtureRequest) -> None:
    found = request.config.pluginmanager.get_plugin("corelm-recorder").suites
    here = {suite.suite.rpartition("::")[2]: suite for suite in found if "test_cassette" in suite.suite}
    if here.keys() != {"TestRecorded", "TestReplayed"}:
        pytest.skip("run the whole file")
    passed = {name: {each.test for each in suite.findings if each.outcome == "passed"} for name, suite in here.items()}
    assert len(passed["TestReplayed"]) > 30
    assert passed["TestRecorded"] - passed["TestReplayed"] <= NOT_REPLAYED
