"""The pictures of the report show the numbers: what is drawn is read back and compared with NumPy."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from corelm_compare.report_plots import against, by_position, divergences, histogram, tails
from corelm_compare.scales import Scale
from corelm_compare.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from helpers.comparisons import comparison, noise, same


def points(figure: str, look: str) -> np.ndarray:
    """Return the points of the first path of a class, as shares of both axes: float64[n, 2]."""
    (path, *_) = re.findall(rf'class="{look}" d="([^"]*)"', figure)
    found = np.array([[float(x), float(y)] for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)])
    found[:, 0] = (found[:, 0] - LEFT) / (WIDTH - LEFT - RIGHT)
    found[:, 1] = (HEIGHT - BOTTOM - found[:, 1]) / (HEIGHT - BOTTOM - TOP)
    return found


def powers(figure: str) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Return where the powers of 10 are on both axes, as their labels say."""
    digits = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    names = {"1": 0, "10": 1, "0.1": -1, "0.01": -2}
    found: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])
    for x, y, anchor, label in re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">(10\S+|1|0.01|0.1)</text>', figure
    ):
        power = names[label] if label in names else int(label[2:].translate(digits))
        if anchor == "middle":
            found[0].append(((float(x) - LEFT) / (WIDTH - LEFT - RIGHT), power))
        else:
            found[1].append(((HEIGHT - BOTTOM - float(y) + 4) / (HEIGHT - BOTTOM - TOP), power))
    return found


def value(axis: list[tuple[float, int]], place: float) -> float:
    """Return the logarithm at a place of an axis."""
    (start, low), (stop, high) = axis[0], axis[-1]
    return low + (high - low) * (place - start) / (stop - start)


def test_a_value_has_its_place():
    for scale, number, place in (
        (Scale.linear(-2, 2), 1.0, 0.75),
        (Scale.log(1e-4, 1.0), 1e-3, 0.25),
        (Scale.symlog(1.0, 0.01), 0.0, 0.5),
        (Scale.symlog(1.0, 0.01), 1.0, 1.0),
        (Scale.symlog(1.0, 0.01), -0.09, 0.5 - 0.5 / np.log10(101)),  # 1 + 0.09 / 0.01 is 10
        (Scale.linear(0, 1), 7.0, 1.0),
    ):
        assert scale.place(number) == pytest.approx(place, abs=1e-6), (scale, number)


def test_equal_steps_on_an_axis_are_equal_distances():
    for scale in (Scale.linear(-3, 9), Scale.log(1e-5, 3), Scale.symlog(0.4, 1e-3)):
        places = scale.places(scale.values(17)).numpy()
        np.testing.assert_allclose(places, np.linspace(0, 1, 17), atol=1e-9)


def test_labels_are_few_apart_and_on_the_axis():
    for scale in (
        *(Scale.linear(low, low + size) for low in (-1e3, 0.0, 3.3) for size in (1e-6, 1.0, 7e5)),
        *(Scale.log(10.0**low, 10.0**high) for low, high in ((-12, 3), (-1, 0), (-0.2, 0.1))),
        *(Scale.symlog(size, threshold) for size in (1e-6, 1.0, 50.0) for threshold in (1e-8, 1e-3, 10.0)),
    ):
        values = [value for value, _ in scale.ticks()]
        assert 2 <= len(values) <= 9 and values == sorted(set(values)), scale
        assert all(scale.low - 1e-9 <= value <= scale.high + 1e-9 for value in values), scale


def test_the_tails_are_shares_of_the_tokens():
    found = comparison({"one": same, "other": noise(3e-3)})
    gap = found.gaps[0]
    drawn = points(tails(found, [gap]), "line s0")
    size = np.abs(gap.delta.double().numpy())
    across, up = powers(tails(found, [gap]))
    assert len(drawn) > 20 and up[-1] == (1.0, 0)
    for x, y in drawn:
        # One unit of the picture's 342 may be a step in the curve.
        low, high = (np.mean(size >= 10 ** value(across, x + off)) for off in (0.004, -0.004))
        assert low * 0.95 <= 10 ** value(up, y) <= high * 1.05
    assert value(across, drawn[-1, 0]) == pytest.approx(np.log10(size.max()), abs=0.03)


def test_a_histogram_holds_every_token_once():
    found = comparison({"one": same, "other": noise(3e-3)})
    drawn = points(histogram(found, found.gaps[0]), "area s0")[1:-1]  # without the corners at the floor
    heights = 10 ** ((drawn[::2, 1] - 1) * 3)
    assert heights[drawn[::2, 1] > 0].sum() == pytest.approx(1.0, rel=0.05)
    # As many to the left of 0 as there are: the picture is not mirrored.
    middle = (drawn[::2, 0] + drawn[1::2, 0]) / 2
    left = heights[(middle < 0.49) & (drawn[::2, 1] > 0)].sum()
    assert left == pytest.approx(float((found.gaps[0].delta < 0).double().mean()), abs=0.12)


def test_side_against_side_puts_equal_numbers_on_the_diagonal():
    found = comparison({"one": same, "other": same, "third": lambda numbers, row: 3 * numbers})
    equal, hot = (against(gap) for gap in found.gaps[:2])
    for figure, on in ((equal, True), (hot, False)):
        squares = re.findall(r"M([\d.]+) ([\d.]+)h", figure)
        across = np.array([(float(x) - LEFT) / (WIDTH - LEFT - RIGHT) for x, _ in squares])
        up = np.array([(HEIGHT - BOTTOM - float(y)) / (HEIGHT - BOTTOM - TOP) for _, y in squares])
        assert bool(np.abs(across - up).max() < 0.05) is on


def test_where_rows_first_differ_is_marked():
    found = comparison()
    figure = divergences(found, found.gaps[0])
    marks = re.findall(r'class="mark" x="([\d.]+)"', figure)
    first = [each.position for each in found.divergences][::-1]  # the first row is at the top
    length = len(found.rows[0].ids)
    expected = [LEFT + at / length * (WIDTH - LEFT - RIGHT) for at in first]
    assert [float(x) for x in marks] == pytest.approx(expected, abs=0.06)
    assert divergences(replace(found, divergences=()), found.gaps[0]) == ""


def test_nothing_is_drawn_of_no_tokens():
    found = comparison(rows=1, length=1)
    gap = found.gaps[0]
    assert gap.count == 0
    assert [histogram(found, gap), tails(found, [gap]), by_position(gap), against(gap)] == [""] * 4


def test_equal_numbers_and_one_token_can_be_drawn():
    equal = comparison({"one": same, "other": same}, verdict="agree", own_size=0.0)
    assert "No token differs" in histogram(equal, equal.gaps[0]) and "nan" not in by_position(equal.gaps[0])
    assert tails(equal, equal.gaps) == ""  # a logarithm has no 0
    single = comparison(rows=1, length=2)
    assert single.gaps[0].count == 1
    for figure in (histogram(single, single.gaps[0]), by_position(single.gaps[0]), against(single.gaps[0])):
        assert "<svg" in figure and "nan" not in figure and "inf" not in figure


def test_pictures_do_not_grow_with_the_tokens():
    small, large = (comparison({"one": same, "other": noise(1e-2)}, rows=rows, length=1000) for rows in (10, 100))
    for draw in (histogram, tails, by_position, against):
        first, second = (
            draw(found, found.gaps[0]) if draw is histogram else draw(found, [found.gaps[0]]) if draw is tails
            else draw(found.gaps[0]) for found in (small, large)
        )  # fmt: skip
        assert len(second) < 1.5 * len(first) + 5000 < 100_000


def test_a_huge_gap_is_drawn(recwarn):
    found = comparison({"one": same, "other": lambda numbers, row: numbers - 1e4 * (torch.arange(len(numbers)) == 3)})
    assert "10⁴" in histogram(found, found.gaps[0]) or "10⁵" in histogram(found, found.gaps[0])
    assert not recwarn.list
