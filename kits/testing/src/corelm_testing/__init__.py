"""The conformance kit: tests that every backend must pass. An engine author inherits them::

    from corelm_testing import BackendConformance

    class TestMine(BackendConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def open_backend(cls):
            return lambda: corelm.get_backend("mine", SMALL_MODEL)

        def oracle(self, ids, temperature):
            ...  # float32[len(ids)], computed without the backend

pytest collects the inherited tests; the backend's `Capabilities` decide which of them apply. `ConformanceBase` lists
what else an author can define. `wide_model` makes a small model to test with, and `PlainOracle` computes its log-probs
with transformers alone.

pytest imports this package in every session, so it must stay light: what needs torch is imported on first access.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from corelm.errors import how_to_install

if find_spec("pytest") is None:
    raise ImportError(f"the conformance kit runs on pytest: {how_to_install('pytest>=8')}")

import pytest

from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.cassette.fixture import Cassettes

THEMES = (
    *("tokens", "logprobs", "sampled_logprobs", "distribution", "support", "top_ids", "seeds", "stopping"),
    *("parameters", "provenance", "fields", "scored_fields", "chat", "streaming", "weights", "in_flight", "sleeping"),
    *("adapters", "faults", "lifecycle"),
)

# Makes failed assertions show both sides. It must run before these modules are imported.
_MODULES = ("tokens", "logprobs", "distribution", "parameters", "fields", "weights", "lifecycle")
pytest.register_assert_rewrite(*(f"corelm_testing.{module}" for module in _MODULES))

if TYPE_CHECKING:
    from corelm_testing.plain_oracle import PlainOracle as PlainOracle
    from corelm_testing.suite import BackendConformance as BackendConformance
    from corelm_testing.wide_models import wide_model as wide_model

__all__ = [
    "BackendConformance",
    "Cassettes",
    "ConformanceBase",
    "PlainOracle",
    "needs",
    "not_applicable",
    "wide_model",
]

_ON_ACCESS = {
    "BackendConformance": "corelm_testing.suite",
    "PlainOracle": "corelm_testing.plain_oracle",
    "wide_model": "corelm_testing.wide_models",
}


def __getattr__(name: str) -> Any:
    if name in _ON_ACCESS:
        return getattr(importlib.import_module(_ON_ACCESS[name]), name)
    raise AttributeError(f"module 'corelm_testing' has no attribute {name!r}")
