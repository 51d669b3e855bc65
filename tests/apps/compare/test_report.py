"""The page: what it says, what it never does, and how large it gets."""

from __future__ import annotations

import html.parser
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from corelm_compare import Comparison, as_html, write_report
from corelm_compare.report_text import log_prob, number, pair, share
from helpers.comparisons import HOSTILE, TEMPERATURE, WORDS, comparison, hotter, noise, same

#: Elements that have no end tag.
_VOID = {"meta", "br", "img"}


class Page(html.parser.HTMLParser):
    """Checks that every element is closed in order, and collects texts, elements and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source, self.text = text, ""
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.elements}


def page(found: Comparison) -> Page:
    return Page(as_html(found))


def test_the_page_begins_with_the_verdict():
    for verdict, said in (
        ("agree", "transformers and vllm agree"),
        ("rounding", "differ as their dtypes round"),
        ("differ", "transformers and vllm differ: missing-scale"),
        ("unexplained", "cause not found"),
    ):
        changes = {"transformers": same, "vllm": same if verdict == "agree" else hotter}
        shown = page(comparison(changes, verdict=verdict)).text.strip()
        assert said in shown[:400]
        if verdict == "differ":
            assert shown.index("ask for raw log-probs") < shown.index("How far apart") < shown.index("What was tried")
            assert "0.41 → 3.1e-7 nats" in shown


def test_the_page_has_the_numbers_of_the_comparison():
    found = comparison()
    shown = page(found)
    for gap in (found.gaps[0], *(each for each in found.own if each.mean_abs)):
        assert number(gap.mean_abs) in shown.text and number(gap.max_abs) in shown.text
    gap = found.gaps[0]
    assert share(gap.outside) in shown.text and pair(gap) in shown.text
    worst = gap.worst[0]
    assert log_prob(worst.one) in shown.text and log_prob(worst.other) in shown.text
    row = found.rows[worst.row]
    titles = [attributes.get("title") or "" for name, attributes in shown.elements if name == "span"]
    about = [each for each in titles if each.startswith(f"position {worst.position}, id {row.ids[worst.position]}:")]
    assert any(f"Δ {number(worst.other - worst.one, sign=True)}" in each for each in about)


def test_a_token_is_coloured_by_the_sign_and_the_size_of_its_difference():
    def change(numbers, row):
        numbers = numbers.clone()
        if row == 1:
            numbers[5] += 2.0
            numbers[7] -= 2.0
            numbers[9] += 1e-3 * 3
        return numbers

    shown = page(comparison({"one": same, "other": change}, verdict="unexplained"))
    looks: dict[int, str] = {}
    for name, attributes in shown.elements:
        if name == "span" and (title := attributes.get("title") or "").startswith("position"):
            # The row that differs most is the first.
            looks.setdefault(int(title.split(",")[0].removeprefix("position ")), attributes["class"] or "")
    assert "up4" in looks[5] and "down4" in looks[7] and "up1" in looks[9] and looks[20] == ""


def test_texts_of_others_are_shown_and_not_obeyed():
    words = [*HOSTILE, *WORDS]
    bad = "<img src=x onerror=alert(1)>"
    found = comparison({bad: same, "\u202evllm": hotter}, words=words)
    found = replace(
        found,
        causes=(replace(TEMPERATURE, side=bad, evidence=bad, advice=bad, id=bad),),
        notes=(bad,),
        ruled_out=(bad,),
        not_tried={bad: bad},
        oracle=bad,
        sides=tuple(replace(side, model=bad, options={bad: bad}, software=bad, dtype=bad) for side in found.sides),
        experiments=tuple(replace(each, changed=bad, note=bad, side=bad, id=bad) for each in found.experiments),
    )
    source = as_html(found)
    shown = Page(source)
    assert shown.names.isdisjoint({"script", "b", "iframe", "link", "object", "a", "form"})
    assert "<script>alert(1)</script>" in shown.text and bad in shown.text
    attributes = [(name, value or "") for _, found in shown.elements for name, value in found.items()]
    assert not [name for name, _ in attributes if name.startswith("on") or name == "href"]
    assert all(value.startswith("data:image/png;base64,") for name, value in attributes if name == "src")
    # No override of the direction of writing, no control character, no half of a character.
    assert all(each.isprintable() or each == "\n" for each in source) and "\\u202e" in shown.text
    source.encode("utf-8")


def test_the_page_needs_no_network_and_runs_nothing():
    source = as_html(comparison())
    assert not re.search(r"https?:|url\(|@import|<script|javascript:", source)
    policy = next(found["content"] for name, found in Page(source).elements if "http-equiv" in found and name == "meta")
    assert policy is not None and "default-src 'none'" in policy and "script" not in policy


def test_each_pair_of_three_sides_has_its_pictures_and_the_largest_comes_first():
    found = comparison({"a": same, "b": noise(1e-4), "c": hotter}, verdict="unexplained")
    shown = page(found).text
    assert shown.index("a → c, token by token") < shown.index("a → b, token by token")
    assert "No cause was found" in shown


def test_without_matplotlib_there_are_no_pictures_and_all_numbers(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = comparison()
    shown = page(found)
    assert "img" not in shown.names and "Pictures need matplotlib" in shown.text
    assert number(found.gaps[0].mean_abs) in shown.text


def test_a_long_token_is_cut():
    source = as_html(comparison(words=["x" * 5000, *WORDS]))
    assert "x" * 61 not in source and "x" * 60 + "…" in source


def test_an_empty_comparison_can_be_shown():
    found = replace(
        comparison(),
        gaps=(), own=(), rows=(), divergences=(), experiments=(), causes=(), ruled_out=(), not_tried={}, notes=(),
        oracle=None, verdict="agree",
    )  # fmt: skip
    assert "transformers and vllm agree" in page(found).text


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        write_report(comparison(), tmp_path)
