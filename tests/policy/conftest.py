"""Fixtures of the policy tests."""

import pytest
from toy_backend import Bigram

import corelm


@pytest.fixture(scope="module")
def backend():
    """Yield a toy backend that the tests of a file share."""
    with corelm.get_backend("toy") as opened:
        yield opened


@pytest.fixture(scope="module")
def other():
    """Yield the same model under another label: its log-probs have another provenance."""
    with corelm.get_backend("toy", Bigram.of_talk()) as opened:
        yield opened
