"""The text for a terminal, and the words and numbers that it shares with the page."""

from __future__ import annotations

import math
from dataclasses import replace

from corelm_compare import as_text
from corelm_compare.report_text import number
from helpers.comparisons import TEMPERATURE, comparison, noise, same


def test_the_verdict_comes_first_then_cause_and_advice_then_distances_then_the_rest():
    text = as_text(comparison(), 100)
    assert text.startswith("FAIL: transformers and vllm differ: missing-scale\n")
    positions = [
        text.index(each)
        for each in ("cause: missing-scale in vllm (certain)", "→ ask for raw", "mean |Δ|  ", "ruled out:")
    ]
    assert positions == sorted(positions) and positions[1] < 600
    assert "transformers, each row alone" in text and "plain forward → vllm" in text
    assert "\nplain forward: transformers in float32, of /models/tiny\n" in text
    assert "plain forward:" not in as_text(replace(comparison(), oracle=None))


def test_each_line_has_its_own_limit_and_the_dtypes_are_named():
    """What a side rounds when it samples is no noise between the scores of two sides."""
    made = comparison({"exact": same, "rounded": noise(3e-3)}, verdict="rounding")
    sides = (made.sides[0], replace(made.sides[1], dtype="bfloat16"))
    sampled = replace(made.own[-1], kind="sampled", mean_abs=0.0076)
    limits, from_plain = {"exact": 2e-4, "rounded": 0.1}, {"exact": 2e-4, "rounded": 0.3}
    made = replace(made, sides=sides, own=(sampled,), limits=limits, oracle_limits=from_plain)
    text = as_text(replace(made, verdict="unexplained"), 120)
    assert "scored by exact (float32) and rounded (bfloat16): " in text
    assert "between their scores, up to 2.0e-6 is noise" in text and "The verdict rests on the scores of two" in text
    row = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert row["rounded, sampled / scored"][4:6] == ["0.0076", "0.1"]
    assert row["exact → rounded"][4] == "2.0e-6"
    assert row["plain forward → rounded"][5] == "0.3"
    # The verdict OK rests on what the coarser dtype rounds.
    text = as_text(made, 120)
    row = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert row["exact → rounded"][4] == "0.3" and "between their scores, up to 0.3 is rounding" in text


def test_a_word_says_what_the_exit_code_is():
    for verdict, word in (("agree", "OK"), ("rounding", "OK"), ("unexplained", "FAIL")):
        assert as_text(comparison(verdict=verdict)).startswith(f"{word}: ")


def test_texts_of_others_do_not_reach_the_terminal_unchanged():
    bad = "\x1b[2J\u202e\n"
    text = as_text(replace(comparison(), causes=(replace(TEMPERATURE, side=bad, evidence=bad),), notes=(bad,)))
    assert all(each.isprintable() or each == "\n" for each in text) and "\\x1b[2J" in text


def test_what_is_no_number_is_shown_as_such():
    assert (number(math.nan), number(math.inf), number(-math.inf)) == ("–", "∞", "−∞")
