"""Two tiny models behind the transformers plugin: the sampler, and a trained one with slightly different weights; and
a check of observers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import corelm
from corelm.backend.backend import Backend
from helpers.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=0)


@pytest.fixture(scope="module")
def trained():
    """Return a model so close to `model` that some ratios are clipped and some are not."""
    moved = tiny_model(seed=0)
    for parameter, noise in zip(moved.parameters(), tiny_model(seed=1).parameters(), strict=True):
        parameter.data += 0.03 * noise.data
    return moved


@pytest.fixture(scope="module")
def backend(model) -> Iterator[Backend]:
    with corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer()) as opened:
        yield opened


@pytest.fixture(scope="module")
def trainer(trained) -> Iterator[Backend]:
    with corelm.get_backend("transformers", trained, tokenizer=tiny_tokenizer()) as opened:
        yield opened


@pytest.fixture
def sound(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Assert that no observer has failed: that would be logged, and raised nowhere."""
    yield
    assert not [record for record in caplog.records if record.name == "corelm_interop.observer"]
