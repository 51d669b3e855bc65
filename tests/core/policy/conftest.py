"""Fixtures of the policy tests."""

import pytest

import corelm
from corelm_testing.toy import Bigram


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
