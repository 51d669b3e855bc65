"""Engines join a fleet that runs, and leave it."""

from __future__ import annotations

import pytest
import torch

from apps.fleet.conftest import PROMPTS, SAMPLING
from corelm.errors import BackendClosedError, InvalidRequestError
from helpers.mortal_toys import OTHER, Toys, one_engine
from helpers.processes import wait_until


def test_engines_join_with_the_weights_in_force_and_leave_when_their_rows_are_done() -> None:
    expected = one_engine(OTHER).generate(PROMPTS, SAMPLING).ids.tolist()
    with Toys("a") as toys:
        toys.backend.update_weights({"table": OTHER})
        toys.fleet.join(toys.member("b"))
        with pytest.raises(InvalidRequestError):
            toys.fleet.join(toys.member("b"))
        toys.settle()
        toys.fleet.drain("a")
        assert wait_until(lambda: toys.states() == {"a": "gone", "b": "healthy"}, 10)
        assert toys.backend.generate(PROMPTS, SAMPLING).ids.tolist() == expected
        assert wait_until(lambda: toys.made[0].closed == 1, 10)
        # A name can be used again.
        toys.fleet.join(toys.member("a"))
        toys.settle()
        assert toys.backend.generate(PROMPTS, SAMPLING).ids.tolist() == expected
        assert len(toys.made) == 3
    with pytest.raises(BackendClosedError):
        toys.fleet.join(toys.member("c"))


def test_an_engine_that_answers_otherwise_does_not_join() -> None:
    with Toys("a", tables={"odd": OTHER}) as toys:
        toys.fleet.join(toys.member("odd"))
        assert wait_until(lambda: "canary disagreed" in toys.fleet.status()[1].why, 10), toys.fleet.status()
        assert (
            toys.backend.generate(PROMPTS, SAMPLING).ids.tolist()
            == one_engine().generate(PROMPTS, SAMPLING).ids.tolist()
        )


def test_an_engine_of_another_kind_does_not_join() -> None:
    with Toys("a") as toys, Toys("small", per_answer_seeds=False) as others:
        toys.fleet.join(others.member("small"))
        assert wait_until(lambda: "can do less" in toys.fleet.status()[1].why, 10), toys.fleet.status()
        assert torch.equal(*(each.backend.tokenize(["a"]).ids.values for each in (toys, others)))
