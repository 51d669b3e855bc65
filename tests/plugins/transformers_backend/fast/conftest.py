"""Fixtures of the tests of `transformers_backend.fast`."""

from __future__ import annotations

import pytest

from transformers_backend.fast import logit_tiles


@pytest.fixture
def narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles 1,024 entries wide for a single token already, so that a small test has several of them."""
    monkeypatch.setattr(logit_tiles, "_CPU_TILE", (1, 1024))
