"""A comparison as JSON, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from corelm.errors import InvalidRequestError
from corelm_compare import as_html, as_text, from_json
from helpers.comparisons import HOSTILE, WORDS, comparison


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("arrays", [False, True])
def test_json_becomes_the_same_comparison(arrays):
    found = comparison(words=[*HOSTILE, *WORDS])
    written = json.dumps(found.to_json(arrays=arrays))
    back = from_json(strict(written))
    assert json.dumps(back.to_json(arrays=arrays)) == written
    assert back.causes == found.causes and back.sides == found.sides and back.headline == found.headline
    # NaN is not equal to itself.
    assert str(back.rows) == str(found.rows)
    if arrays:
        torch.testing.assert_close(back.gaps[0].delta, found.gaps[0].delta)
        assert back.gaps[0].rows.dtype == torch.int64 and as_html(back) == as_html(found)
    else:
        assert back.gaps[0].delta.shape == (0,) and back.gaps[0].mean_abs == found.gaps[0].mean_abs


def test_a_saved_comparison_without_arrays_can_still_be_shown():
    back = from_json(comparison().to_json())
    assert "How far apart" in as_html(back)


def test_a_comparison_that_was_saved_without_limits_is_shown_with_its_tolerances():
    made = comparison().to_json()
    del made["limits"], made["oracle_limits"]
    assert as_text(from_json(made)) == as_text(comparison())


def test_the_format_is_named_and_another_one_is_refused():
    made = comparison().to_json()
    assert made["format"] == "corelm_compare/1" and made["exit_code"] == 1
    for other in ({}, {**made, "format": "corelm_compare/2"}, [], None):
        with pytest.raises(InvalidRequestError):
            from_json(other)  # type: ignore[arg-type]


def test_what_is_wrong_is_named_by_its_place():
    whole = json.dumps(comparison().to_json())
    for change, place in (
        (lambda made: made.pop("verdict"), "comparison.verdict"),
        (lambda made: made.update(verdict="maybe"), "comparison.verdict"),
        (lambda made: made["gaps"][1].pop("count"), "comparison.gaps[1].count"),
        (lambda made: made["gaps"][1].update(count="3"), "comparison.gaps[1].count"),
        (lambda made: made["rows"][2].pop("numbers"), "comparison.rows[2].numbers"),
        (lambda made: made["causes"][0].pop("figures"), "comparison.causes[0].figures"),
        (lambda made: made["sides"][0].update(calls=True), "comparison.sides[0].calls"),
        (lambda made: made.update(notes="none"), "comparison.notes"),
        (lambda made: made.update(tolerances=[1]), "comparison.tolerances"),
        (lambda made: made["rows"].append(3), "comparison.rows[12]"),
        (lambda made: made["causes"][0]["figures"].update(before="x"), "comparison.causes[0].figures.before"),
    ):
        made = json.loads(whole)
        change(made)
        with pytest.raises(InvalidRequestError) as caught:
            from_json(made)
        assert caught.value.field == place
