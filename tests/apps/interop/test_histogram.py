"""`Histogram`: quantiles against those of all values, and its memory."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from corelm_interop.timing import Histogram
from helpers.each import case


def test_quantiles_are_within_one_percent_of_those_of_all_values() -> None:
    for shape in ["lognormal", "uniform", "two values", "whole numbers"]:
        with case(shape):
            random = np.random.default_rng(0)
            values = {
                "lognormal": random.lognormal(-3, 2, 20_000),
                "uniform": random.uniform(0.001, 0.002, 20_000),
                "two values": random.choice([0.01, 30.0], 20_000),
                "whole numbers": random.integers(1, 500, 20_000).astype(float),
            }[shape]
            histogram = Histogram()
            for value in values.tolist():
                histogram.add(value)
            spread = histogram.spread()
            assert spread is not None
            for share, found in ((0.5, spread.median), (0.9, spread.p90), (0.99, spread.p99)):
                # Of the values themselves, not between two of them: no bucket lies between 0.01 and 30.
                assert found == pytest.approx(np.quantile(values, share, method="inverted_cdf"), rel=0.0101)
            assert (spread.count, spread.least, spread.most) == (20_000, values.min(), values.max())
            assert spread.mean == pytest.approx(values.mean())


def test_memory_is_bounded_whatever_the_values_are() -> None:
    histogram = Histogram()
    for exponent in np.linspace(-300, 300, 50_000).tolist():
        histogram.add(10.0**exponent)
    # Without a least and a largest bucket there would be one for nearly each of these values.
    assert len(pickle.dumps(histogram)) < 20_000


def test_one_value_is_all_its_quantiles_and_no_value_has_none() -> None:
    histogram = Histogram()
    assert histogram.spread() is None and math.isnan(histogram.quantile(0.5))
    histogram.add(0.0)
    assert histogram.quantile(0.5) == histogram.quantile(0.99) == 0.0
    histogram.add(-1e-7)  # a clock that goes back
    assert histogram.spread().least == 0.0
