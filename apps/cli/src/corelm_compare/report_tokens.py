"""Scored rows in the report: every token coloured by its Δ, and the tokens that differ most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from corelm.errors import printable
from corelm_compare.records import Comparison, Gap, Row
from corelm_compare.report_words import log_prob, number, pair, tolerance

#: Rows that are shown, tokens of each, and shades on both sides of 0.
_ROWS, _TOKENS, _SHADES = 5, 300, 4
#: Characters of a token.
_CHARACTERS = 60
#: Tokens of a row that are shown before the one that differs most.
_BEFORE = 100
#: What is sooner worth a look.
_KINDS = ("conversation", "text", "ids")


@dataclass(frozen=True, slots=True)
class _Shades:
    """Which Δ has which colour.

    Attributes:
        limits: the least |Δ| of each shade, ascending.
    """

    limits: tuple[float, ...]

    @classmethod
    def of(cls, gap: Gap, allowed: float) -> _Shades:
        """Return shades at equal distances, on a logarithmic axis, up to the largest difference.

        They begin at noise, or at a thousandth of the largest difference, so that the largest ones stand out.
        """
        low = max(allowed, gap.max_abs / 1000, 1e-9)
        high = max(gap.max_abs, low * 10)
        return cls(tuple(low * (high / low) ** (shade / _SHADES) for shade in range(_SHADES)))

    def look(self, delta: float) -> str:
        """Return the class of the style: up1 to up4, down1 to down4, or "" for noise."""
        shade = sum(abs(delta) > limit for limit in self.limits)
        return f"{'up' if delta > 0 else 'down'}{shade}" if shade else ""


def scored_rows(comparison: Comparison, gap: Gap) -> str:
    """Return the rows that differ most, a conversation first, with every token coloured by its Δ."""
    shades = _Shades.of(gap, tolerance(comparison, gap))
    shown = _chosen(comparison, gap)
    if not shown:
        return ""
    parts = []
    for place, at in enumerate(shown):
        row = comparison.rows[at]
        title = f"Row {at} · {row.kind}, {row.prompt_length} + {len(row.ids) - row.prompt_length} tokens"
        if row.sampled_by is not None:
            title += f", sampled by {printable(row.sampled_by)}"
        opened = " open" if place == 0 else ""
        parts.append(f"<details{opened}><summary>{escape(title)}</summary>{_row(row, gap, shades)}</details>")
    return f"{_legend(gap, shades)}{''.join(parts)}"


def worst_tokens(gap: Gap) -> str:
    """Return the table of the tokens that differ most."""
    if not gap.worst:
        return ""
    lines = "".join(
        f"<tr><td>{each.row}</td><td>{each.position}</td><td class=token>{_token(each.token)}</td>"
        f"<td>{log_prob(each.one)}</td><td>{log_prob(each.other)}</td>"
        f"<td>{number(each.other - each.one, sign=True)}</td><td>{number(_ratio(each.other - each.one))}</td></tr>"
        for each in gap.worst
    )
    one, other = (escape(printable(name)) for name in (gap.one, gap.other))
    return (
        f"<div class=wide><table class=numbers><caption>The tokens that differ most</caption><tr><th>row</th>"
        f"<th>position</th><th class=words>token</th><th>{one}</th><th>{other}</th><th>Δ</th><th>ratio</th></tr>"
        f"{lines}</table></div>"
    )


def _chosen(comparison: Comparison, gap: Gap) -> list[int]:
    """Return the rows to show: those with the largest differences, and of the first kind that there is one first."""
    largest: dict[int, float] = {}
    for row, size in zip(gap.rows.tolist(), gap.delta.abs().tolist(), strict=True):
        largest[row] = max(size, largest.get(row, 0.0))
    ranked = sorted(largest, key=lambda row: -largest[row])
    if not ranked:
        return []
    first = min(ranked, key=lambda row: _KINDS.index(comparison.rows[row].kind))
    return [first, *(row for row in ranked if row != first)][:_ROWS]


def _row(row: Row, gap: Gap, shades: _Shades) -> str:
    one, other = row.numbers.get(gap.one, ()), row.numbers.get(gap.other, ())
    deltas = [b - a for a, b in zip(one, other, strict=True)]
    known = [at for at, delta in enumerate(deltas) if math.isfinite(delta)]
    worst = max(known, key=lambda at: abs(deltas[at]), default=0)
    start = 0 if len(row.ids) <= _TOKENS else max(0, min(worst - _BEFORE, len(row.ids) - _TOKENS))
    stop = min(len(row.ids), start + _TOKENS)
    pieces = [f"<i>… {start} tokens before</i> "] if start else []
    for at in range(start, stop):
        facts = f"position {at}, id {row.ids[at]}"
        look = "prompt" if at < row.prompt_length else ""
        if at < len(deltas) and math.isfinite(deltas[at]):
            facts += f": {gap.one} {log_prob(one[at])}, {gap.other} {log_prob(other[at])}"
            facts += f", Δ {number(deltas[at], sign=True)}, ratio {number(_ratio(deltas[at]))}"
            look = f"{look} {shades.look(deltas[at])}".strip()
        pieces.append(f'<span class="{look}" title="{escape(printable(facts))}">{_token(row.tokens[at])}</span>')
    pieces += [f" <i>… {len(row.ids) - stop} more</i>"] if stop < len(row.ids) else []
    return f"<p class=scored>{''.join(pieces)}</p>"


def _legend(gap: Gap, shades: _Shades) -> str:
    one, other = (escape(printable(name)) for name in (gap.one, gap.other))
    down = "".join(f'<span class="down{at}">{number(-shades.limits[at - 1])}</span>' for at in range(_SHADES, 0, -1))
    up = "".join(
        f'<span class="up{at}">{number(shades.limits[at - 1], sign=True)}</span>' for at in range(1, _SHADES + 1)
    )
    return (
        f"<p class=shades>{other} gives less than {one} {down}<span>±0</span>{up} and more. Pale text is the prompt. "
        f"Point at a token for its numbers ({escape(printable(pair(gap)))}).</p>"
    )


def _token(text: str) -> str:
    """Return the text of a token as HTML that shows what cannot be seen."""
    shown = text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"
    return escape(printable(shown.replace("\n", "⏎\n"), keep="\n")) or "∅"


def _ratio(delta: float) -> float:
    return math.exp(min(delta, 700.0))
