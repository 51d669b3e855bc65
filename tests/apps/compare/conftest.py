"""Fixtures of the tests of `corelm_compare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.planted_defects import saved

Folder = Callable[..., Path]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a function that saves a model of a family with one layer once, and returns its folder."""
    known: dict[Any, Path] = {}

    def find(family: str, seed: int = 0, **changes: Any) -> Path:
        # The layers of gemma2 take turns: every second one has a sliding window.
        changes = {"num_hidden_layers": 2 if family == "gemma2" else 1, **changes}
        key = (family, seed, repr(changes))
        if key not in known:
            known[key] = saved(tmp_path_factory.mktemp("compare") / family, family, seed, **changes)
        return known[key]

    return find
