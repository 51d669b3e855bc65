"""The text for a terminal, and the words and numbers that it shares with the page."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from corelm_compare import as_text
from corelm_compare.report_text import number
from helpers.comparisons import TEMPERATURE, comparison, hotter, noise, same


def test_no_line_is_wider_than_the_terminal():
    found = comparison({"a server with a long name that does not fit": same, "vllm": hotter, "sglang": noise(1e-4)})
    for width in (40, 80, 120):
        longest = max(map(len, as_text(found, width).splitlines()))
        assert longest <= (width if width > 60 else 66)  # five columns of numbers and a name need 66


def test_the_verdict_comes_first_then_cause_and_advice_then_distances_then_the_rest():
    text = as_text(comparison())
    assert text.startswith("FAIL: transformers and vllm differ: missing-scale\n")
    places = [
        text.index(each)
        for each in ("cause: missing-scale in vllm (certain)", "→ ask for raw", "mean |Δ|  ", "ruled out:")
    ]
    assert places == sorted(places) and places[1] < 600
    assert "transformers, each row alone" in text and "plain forward → vllm" in text


def test_a_word_says_what_the_exit_code_is():
    for verdict, word in (("agree", "OK"), ("rounding", "OK"), ("unexplained", "FAIL")):
        assert as_text(comparison(verdict=verdict)).startswith(f"{word}: ")


def test_texts_of_others_do_not_reach_the_terminal_unchanged():
    bad = "\x1b[2J\u202e\n"
    text = as_text(replace(comparison(), causes=(replace(TEMPERATURE, side=bad, evidence=bad),), notes=(bad,)))
    assert all(each.isprintable() or each == "\n" for each in text) and "\\x1b[2J" in text


def test_a_number_keeps_two_digits_and_is_short():
    for size in (1e-12, 9.99e-4, 1e-3, 0.0123, 0.9996, 12.34, 999.6, 99_999.0, 1e5, 3.2e9):
        for value in (size, -size):
            text = number(value)
            assert len(text) <= 8, text
            assert float(text.replace("−", "-")) == pytest.approx(value, rel=0.03)


def test_what_is_no_number_is_shown_as_such():
    assert (number(math.nan), number(math.inf), number(-math.inf)) == ("–", "∞", "−∞")
