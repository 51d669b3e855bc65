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

from importlib.util import find_spec

import lazy_loader

from corelm.errors import how_to_install

if find_spec("pytest") is None:
    raise ImportError(f"the conformance kit runs on pytest: {how_to_install('pytest>=8')}")

import pytest

THEMES = (
    *("tokens", "logprobs", "sampled_logprobs", "distribution", "support", "top_ids", "seeds", "stopping"),
    *("parameters", "provenance", "fields", "scored_fields", "chat", "streaming", "weights", "in_flight", "sleeping"),
    *("adapters", "faults", "lifecycle"),
)

# Makes failed assertions show both sides. It must run before these modules are imported.
_MODULES = ("tokens", "logprobs", "distribution", "parameters", "fields", "weights", "lifecycle")
pytest.register_assert_rewrite(*(f"corelm_testing.{module}" for module in _MODULES))

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
