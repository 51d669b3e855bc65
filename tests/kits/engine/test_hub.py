"""A hub that does not answer is asked once, and then files of this machine are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from corelm_engine_kit import hub_options
from helpers.http_server import FaultServer, json_reply
from helpers.processes import free_port


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")


@pytest.mark.usefixtures("no_hub")
def test_without_a_hub_only_files_of_this_machine_are_read() -> None:
    assert hub_options("some/model") == {"local_files_only": True}


@pytest.mark.usefixtures("no_hub")
def test_a_path_needs_no_hub(tmp_path: Path) -> None:
    assert hub_options(str(tmp_path)) == hub_options(tmp_path) == hub_options(None) == {}


@pytest.mark.usefixtures("no_hub")
def test_a_hub_that_is_switched_off_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_options("some/model") == {}


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_hub_that_answers_is_used(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    with FaultServer(lambda request: json_reply({}, status)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        assert hub_options("some/model") == {}
        assert len(hub.requests) <= 1
