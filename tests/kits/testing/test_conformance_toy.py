"""The toy backend keeps every promise."""

from helpers.toy_conformance import ToyConformance


class TestToy(ToyConformance):
    pass
