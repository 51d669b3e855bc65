"""What the tests of canaries and fleets share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import corelm
from corelm import Backend
from corelm.fleet.canary import Watch


def table(seed: int) -> dict[str, Tensor]:
    """Return weights of the toy model."""
    return {"table": torch.randn(260, 260, generator=torch.Generator().manual_seed(seed))}


def looks(backend: Backend) -> Watch:
    """Return the canary of a backend."""
    assert isinstance(backend.canary, Watch)
    return backend.canary


@pytest.fixture
def toy() -> Iterator[Backend]:
    with corelm.get_backend("toy", canary=True) as backend:
        yield backend
