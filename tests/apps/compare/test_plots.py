"""The pictures of the report: there is something to see in each, and none of them fails on numbers at the edge."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch

from corelm_compare.report import Picture, pictures
from helpers.comparisons import comparison, noise, same

image = pytest.importorskip("matplotlib.image")


def pixels(picture: Picture) -> np.ndarray:
    """Return the picture, float[height, width, 4]."""
    return image.imread(io.BytesIO(base64.b64decode(picture.png)), format="png")


def test_another_gap_is_another_picture():
    found = comparison({"one": same, "other": noise(3e-3), "third": lambda numbers, row: 3 * numbers})
    first, second = (pictures(found, gap) for gap in found.gaps[:2])
    assert [each.title for each in first] == [each.title for each in second]
    for one, other in zip(first, second, strict=True):
        assert not np.array_equal(pixels(one), pixels(other)), one.title
        assert pixels(one).std() > 0.05


def test_nothing_is_drawn_of_no_tokens():
    found = comparison(rows=1, length=1)
    assert found.gaps[0].count == 0 and pictures(found, found.gaps[0]) == []


@pytest.mark.parametrize(
    "found",
    [
        comparison({"one": same, "other": same}, verdict="agree", own_size=0.0),
        comparison(rows=1, length=2),
        comparison({"one": same, "other": lambda numbers, row: numbers - 1e4 * (torch.arange(len(numbers)) == 3)}),
        comparison({"$x_1$ \u202e": same, "\U0001f642": noise(1e-2)}),
    ],
    ids=["equal numbers", "one token", "a huge gap", "names that are formulas, or have no glyphs"],
)
def test_numbers_and_names_at_the_edge_are_drawn(found, recwarn):
    assert len(pictures(found, found.gaps[0])) == 4
    assert not recwarn.list


def test_pictures_do_not_grow_with_the_tokens():
    small, large = (comparison({"one": same, "other": noise(1e-2)}, rows=rows, length=1000) for rows in (10, 100))
    sizes = [[len(each.png) for each in pictures(found, found.gaps[0])] for found in (small, large)]
    assert max(map(max, sizes)) < 200_000
