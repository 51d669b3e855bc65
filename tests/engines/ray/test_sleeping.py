"""Engines in actors sleep and wake as one, unless other drivers need them."""

from __future__ import annotations

from pathlib import Path

import pytest

import corelm
from corelm.errors import BackendAsleepError, CapabilityError, EngineError
from engines.ray.conftest import Open, await_healthy
from helpers import oracle
from helpers.tiny_models import random_rows, tiny_model

(IDS,) = random_rows(20)


def agrees(backend: corelm.Backend, seed: int) -> bool:
    found = backend.score_logprobs([IDS] * 4).logprobs.split()
    return all(row.allclose(oracle.logprobs(tiny_model(seed=seed), IDS), rtol=0, atol=1e-5) for row in found)


def test_all_actors_sleep_and_answer_with_their_weights_or_with_new_ones(open_toys: Open, model: Path) -> None:
    backend = open_toys(inner="transformers", model=model, replicas=2)
    assert agrees(backend, 0)
    backend.sleep()
    with pytest.raises(BackendAsleepError):
        backend.score_logprobs([IDS])
    backend.wake()
    assert agrees(backend, 0)
    backend.sleep(level=2)
    backend.wake("weights")
    backend.update_weights(tiny_model(seed=1))
    backend.wake()
    assert agrees(backend, 1)
    await_healthy(backend)


def test_an_actor_that_several_drivers_use_stays_awake(open_toys: Open, model: Path) -> None:
    first = open_toys(inner="transformers", model=model, actor_name="sleepy")
    second = open_toys(inner="transformers", model=model, actor_name="sleepy")
    with pytest.raises(CapabilityError, match="2 drivers use the actor, and the others would get no answers"):
        first.sleep()
    assert agrees(first, 0) and agrees(second, 0)
    second.close()
    first.sleep()
    with pytest.raises(EngineError, match="or it sleeps"):
        open_toys(inner="transformers", model=model, actor_name="sleepy")
    first.wake()
    third = open_toys(inner="transformers", model=model, actor_name="sleepy")
    assert agrees(third, 0) and agrees(first, 0)
