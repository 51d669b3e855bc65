"""What the tests of canaries and fleets share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import corelm
from corelm import Backend
from corelm_fleet.canary import Watch, canary_of
from helpers.mortal_toys import OTHER, Toys, one_engine

#: What tests of fleets ask for, and what one engine answers.
PROMPTS = [[72, n] for n in range(40, 60)]
SAMPLING: dict[str, Any] = {"max_new_tokens": 8, "seed": 3, "temperature": 0.9}
ONE = one_engine()
EXPECTED = ONE.generate(PROMPTS, SAMPLING)
#: The answers with the weights that every engine is started with, and with others.
OLD, NEW = EXPECTED.ids.tolist(), one_engine(OTHER).generate(PROMPTS, SAMPLING).ids.tolist()


def assert_same(found: Any, expected: Any = EXPECTED) -> None:
    """Check that answers are those of one engine."""
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.finish_reasons == expected.finish_reasons
    torch.testing.assert_close(found.logprobs.values, expected.logprobs.values)


def answers(toys: Toys) -> list[list[int]]:
    found: list[list[int]] = toys.backend.generate(PROMPTS, SAMPLING).ids.tolist()
    return found


def table(seed: int) -> dict[str, Tensor]:
    """Return weights of the toy model."""
    return {"table": torch.randn(260, 260, generator=torch.Generator().manual_seed(seed))}


def looks(backend: Backend) -> Watch:
    """Return the canary of a backend."""
    return canary_of(backend)


@pytest.fixture
def toy() -> Iterator[Backend]:
    with corelm.get_backend("toy", canary=True) as backend:
        yield backend
