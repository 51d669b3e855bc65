"""A canary in front of a real vLLM, whose prefix cache it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import corelm_fleet
from corelm import Backend
from corelm.errors import StaleWeightsError
from engines.vllm.conftest import Open
from helpers.tiny_models import tiny_model

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def backend(open_vllm: Open) -> Any:
    with open_vllm(canary=True, enable_prefix_caching=True) as opened:
        yield opened


def test_new_weights_of_a_state_dict_and_of_a_folder_raise_no_alarm(backend: Backend, tmp_path: Path) -> None:
    canary = corelm_fleet.canary_of(backend)
    canary.look()
    for seed in (1, 1, 2):
        other = tiny_model(seed=seed, hidden_size=128)
        backend.update_weights(other.state_dict(), expect=corelm_fleet.probe_scores(other))
        canary.look()
    other.save_pretrained(tmp_path)
    backend.update_weights(tmp_path)
    backend.update_weights(tmp_path, expect=corelm_fleet.probe_scores(other))


def test_other_weights_than_expected_are_found(backend: Backend) -> None:
    other = tiny_model(seed=3, hidden_size=128)
    with pytest.raises(StaleWeightsError, match="those expected"):
        backend.update_weights(
            tiny_model(seed=4, hidden_size=128).state_dict(), expect=corelm_fleet.probe_scores(other)
        )
    backend.update_weights(other.state_dict(), expect=corelm_fleet.probe_scores(other))


def test_a_prefix_cache_that_is_not_emptied_is_found(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tiny_model(seed=5, hidden_size=128)

    async def kept() -> bool:
        return True

    monkeypatch.setattr(backend.engine.plugin.llm, "reset_prefix_cache", kept)
    with pytest.raises(StaleWeightsError):
        backend.update_weights(other.state_dict())
