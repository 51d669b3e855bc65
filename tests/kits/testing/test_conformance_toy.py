"""The toy backend keeps every promise."""

from __future__ import annotations

from helpers.toy_conformance import ToyConformance


class TestToy(ToyConformance):
    pass
