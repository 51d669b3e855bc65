"""The conformance kit: tests that every backend must pass. An engine author inherits them::

    from corelm.testing import BackendConformance

    class TestMine(BackendConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def open_backend(cls):
            return lambda: corelm.get_backend("mine", SMALL_MODEL)

        def oracle(self, ids, temperature):
            ...  # float32[len(ids)], computed without the backend

pytest collects the inherited tests; the backend's `Capabilities` decide which of them apply. `ConformanceBase` lists
what else an author can define. pytest imports this package in every session, so it must stay light: the test modules
are imported on first access to `BackendConformance`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("pytest") is None:
    raise ImportError('the conformance kit runs on pytest: pip install "pytest>=8"')

import pytest

from corelm.testing.base import ConformanceBase, needs, not_applicable
from corelm.testing.cassettes import Cassettes

THEMES = (
    *("tokens", "logprobs", "sampled_logprobs", "distribution", "support", "top_ids", "seeds", "stopping"),
    *("parameters", "provenance", "fields", "scored_fields", "chat", "streaming", "weights", "in_flight", "sleeping"),
    *("adapters", "faults", "bad_results", "lifecycle"),
)

# Makes failed assertions show both sides. It must run before these modules are imported.
pytest.register_assert_rewrite(*(f"corelm.testing.{theme}" for theme in THEMES))

if TYPE_CHECKING:
    from corelm.testing.suite import BackendConformance as BackendConformance

__all__ = ["BackendConformance", "Cassettes", "ConformanceBase", "needs", "not_applicable"]


def __getattr__(name: str) -> Any:
    if name == "BackendConformance":
        return importlib.import_module("corelm.testing.suite").BackendConformance
    raise AttributeError(f"module 'corelm.testing' has no attribute {name!r}")
