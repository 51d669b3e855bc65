"""The number of actors changes while calls run."""

from __future__ import annotations

from typing import Any

import pytest

import corelm
from corelm.errors import CapabilityError, InvalidRequestError
from engines.ray.conftest import Open, await_healthy
from helpers.insides import pids
from helpers.processes import all_end, wait_until

PROMPTS = [[72, n] for n in range(40, 60)]
SAMPLING: dict[str, Any] = {"max_new_tokens": 8, "seed": 3, "temperature": 0.9}


def test_actors_join_and_leave(open_toys: Open) -> None:
    expected = corelm.get_backend("toy").generate(PROMPTS, SAMPLING).ids.tolist()
    backend = open_toys()
    fleet = backend.engine.plugin
    fleet.scale(2)
    assert len(fleet.status()) == 2
    await_healthy(backend)
    assert backend.generate(PROMPTS, SAMPLING).ids.tolist() == expected
    both = pids(backend)
    fleet.scale(1)
    assert wait_until(lambda: [each.state for each in fleet.status()] == ["healthy", "gone"], 60)
    assert backend.generate(PROMPTS, SAMPLING).ids.tolist() == expected
    assert all_end(both[1:]) and pids(backend) == both[:1]
    with pytest.raises(InvalidRequestError, match="room for") as refusal:
        fleet.scale(1000)
    assert refusal.value.field == "num_cpus" and len(fleet.status()) == 2


def test_another_programs_actors_are_not_scaled(open_toys: Open) -> None:
    open_toys(actor_name="scaled")
    joined = open_toys(actor_name="scaled")
    with pytest.raises(CapabilityError, match="another program"):
        joined.engine.plugin.scale(2)
