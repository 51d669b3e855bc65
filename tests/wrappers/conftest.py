"""Fixtures of the tests of wrappers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def sound(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Assert that no observer has failed: that would be logged, and raised nowhere."""
    yield
    assert not [record for record in caplog.records if record.name == "corelm.wrappers.observer"]
