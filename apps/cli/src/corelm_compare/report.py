"""`as_html`: a comparison as one page that needs no network and no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from corelm._version import __version__
from corelm.errors import printable
from corelm_compare.records import CAUSES, Comparison, Gap, Row
from corelm_compare.report_plots import pictures
from corelm_compare.report_text import (
    between,
    log_prob,
    number,
    own_gaps,
    pair,
    share,
    summary,
    tolerance,
    worst_own,
    worst_sampled,
)

#: Rows that are shown for each pair, tokens of each, tokens before the one that differs most, and shades of colour.
_ROWS, _TOKENS, _BEFORE, _SHADES = 5, 300, 100, 4
#: Characters of a token.
_CHARACTERS = 60
#: What is sooner worth a look.
_KINDS = ("conversation", "text", "ids")


def write_report(comparison: Comparison, path: str | PathLike[str]) -> None:
    """Write the page to a file.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(as_html(comparison), encoding="utf-8")


def as_html(comparison: Comparison) -> str:
    """Return the page: verdict, causes, gaps, pictures, scored rows, what was tried, and the sides.

    All texts of prompts, tokens, engines and files are escaped. The pictures need matplotlib.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters |= {"number": number, "log_prob": log_prob, "share": share, "token": _token, "pair": pair}
    return environment.get_template("report.html.j2").render(
        comparison=comparison,
        version=__version__,
        meanings=CAUSES,
        summary=summary(comparison),
        pairs=between(comparison.gaps),
        own={side.name: own_gaps(comparison, side.name) for side in comparison.sides},
        worst_own=[
            (side.name, gap)
            for side in comparison.sides
            for gap in (worst_own(comparison, side.name), worst_sampled(comparison, side.name))
            if gap is not None
        ],
        # Those of ids and answers first: they are few, and explain the others.
        divergences=sorted(comparison.divergences, key=lambda each: each.what == "numbers"),
        over=lambda gap: gap.mean_abs > tolerance(comparison, gap),
        pictures=lambda gap: pictures(comparison, gap),
        scored_rows=lambda gap: list(_scored_rows(comparison, gap)),
        ratio=_ratio,
    )


class _ScoredRow(NamedTuple):
    """A row of the page: its number, the row, what was left out at both ends, and its tokens.

    A token is a class of the style, its numbers in words, and its text.
    """

    number: int
    row: Row
    before: int
    after: int
    tokens: list[tuple[str, str, str]]


def _scored_rows(comparison: Comparison, gap: Gap) -> Iterator[_ScoredRow]:
    """Return the rows with the largest differences; of the first kind that there is one first."""
    largest: dict[int, float] = {}
    for at, size in zip(gap.rows.tolist(), gap.delta.abs().tolist(), strict=True):
        largest[at] = max(size, largest.get(at, 0.0))
    ranked = sorted(largest, key=lambda row: -largest[row])
    first = min(ranked, key=lambda at: _KINDS.index(comparison.rows[at].kind), default=None)
    look = _shades(gap, tolerance(comparison, gap))
    for at in sorted(ranked, key=lambda row: row != first)[:_ROWS]:
        row = comparison.rows[at]
        one, other = row.numbers.get(gap.one, ()), row.numbers.get(gap.other, ())
        deltas = [b - a for a, b in zip(one, other, strict=True)]
        worst = max(
            (n for n, each in enumerate(deltas) if math.isfinite(each)), key=lambda n: abs(deltas[n]), default=0
        )
        start = 0 if len(row.ids) <= _TOKENS else max(0, min(worst - _BEFORE, len(row.ids) - _TOKENS))
        stop = min(len(row.ids), start + _TOKENS)
        tokens = []
        for n in range(start, stop):
            facts, shade = f"position {n}, id {row.ids[n]}", "prompt" if n < row.prompt_length else ""
            if n < len(deltas) and math.isfinite(deltas[n]):
                facts += f": {gap.one} {log_prob(one[n])}, {gap.other} {log_prob(other[n])}"
                facts += f", Δ {number(deltas[n], sign=True)}, ratio {number(_ratio(deltas[n]))}"
                shade = f"{shade} {look(deltas[n])}".strip()
            tokens.append((shade, facts, row.tokens[n]))
        yield _ScoredRow(at, row, start, len(row.ids) - stop, tokens)


def _shades(gap: Gap, allowed: float) -> Callable[[float], str]:
    """Return what gives the class of a Δ: up1 to up4, down1 to down4, or "" for noise.

    Shades are at equal distances on a logarithmic axis up to the largest difference. They begin at noise, or at a
    thousandth of the largest difference, so that the largest ones stand out.
    """
    low = max(allowed, gap.max_abs / 1000, 1e-9)
    step = (max(gap.max_abs, low * 10) / low) ** (1 / _SHADES)

    def look(delta: float) -> str:
        shade = sum(abs(delta) > low * step**n for n in range(_SHADES))
        return f"{'up' if delta > 0 else 'down'}{shade}" if shade else ""

    return look


def _printable(value: Any) -> Any:
    """Return a text with escape sequences for what is not printable."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _token(text: str) -> Markup:
    """Return the text of a token as HTML that shows what cannot be seen."""
    shown = text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"
    return escape(printable(shown.replace("\n", "⏎\n"), keep="\n") or "∅")


def _ratio(delta: float) -> float:
    return math.exp(min(delta, 700.0))
