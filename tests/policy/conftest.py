"""One toy backend for the tests of a file."""

import pytest

import corelm


@pytest.fixture(scope="module")
def backend():
    with corelm.get_backend("toy") as opened:
        yield opened
