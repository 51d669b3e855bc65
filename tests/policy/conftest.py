"""Fixtures of the policy tests."""

import pytest

import corelm


@pytest.fixture(scope="module")
def backend():
    """Yield a toy backend that the tests of a file share."""
    with corelm.get_backend("toy") as opened:
        yield opened
