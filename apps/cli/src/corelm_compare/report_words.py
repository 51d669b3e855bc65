"""Words and numbers that the report and the terminal share."""

from __future__ import annotations

import math
from collections.abc import Iterable

from corelm_compare.records import Comparison, Gap, GapKind, Verdict

VERDICTS: dict[Verdict, str] = {
    "agree": "agree",
    "rounding": "rounding only",
    "differ": "differ",
    "unexplained": "differ, cause not found",
}
#: What a distance of a side to itself compares.
KINDS: dict[GapKind, str] = {
    "sides": "two sides",
    "oracle": "from the plain forward",
    "again": "the same call again",
    "company": "each row alone",
    "order": "rows in another order",
    "late_start": "from the answer on",
    "sampled": "sampled / scored",
}


def number(value: float, sign: bool = False) -> str:
    """Return a number with two or three digits that count.

    >>> number(0.0), number(3.1e-7), number(0.04567), number(12.3456), number(-0.5, sign=True)
    ('0', '3.1e-7', '0.0457', '12.3', '−0.5')
    """
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "–")
    if value == 0:
        return "0"
    size = abs(value)
    if 1e-3 <= size < 1e5:
        text = f"{size:.3g}" if size < 999.5 else f"{size:.0f}"
    else:
        digits, _, power = f"{size:.1e}".partition("e")
        text = f"{digits}e{int(power)}"
    return ("−" if value < 0 else "+" if sign else "") + text


def log_prob(value: float) -> str:
    """Return a log-prob in nats with four decimals.

    >>> log_prob(-10.71258)
    '−10.7126'
    """
    return f"{value:.4f}".replace("-", "−") if math.isfinite(value) else number(value)


def share(value: float) -> str:
    """Return a share as a percentage.

    >>> share(0.0), share(0.0004), share(0.0803), share(0.64), share(1.0)
    ('0 %', '0.04 %', '8.0 %', '64 %', '100 %')
    """
    percent = 100 * value
    if value == 0 or percent >= 10:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if percent >= 0.1 else f"{percent:.1g} %"


def pair(gap: Gap) -> str:
    """Return what a gap compares."""
    return f"{gap.one} → {gap.other}"


def between(gaps: Iterable[Gap]) -> list[Gap]:
    """Return the gaps between two sides, the largest first."""
    return sorted((gap for gap in gaps if gap.kind == "sides"), key=lambda gap: -gap.mean_abs)


def own_gaps(comparison: Comparison, side: str) -> list[Gap]:
    """Return a side's distances to itself."""
    names = sorted((each.name for each in comparison.sides), key=len, reverse=True)
    return [gap for gap in comparison.own if next((name for name in names if gap.one.startswith(name)), None) == side]


def worst_own(comparison: Comparison, side: str) -> Gap | None:
    """Return a side's largest distance to itself among its scores of the same rows; None if none was measured."""
    return _largest(gap for gap in own_gaps(comparison, side) if gap.kind != "sampled")


def worst_sampled(comparison: Comparison, side: str) -> Gap | None:
    """Return the largest distance between what a side said when it sampled and its scores; None without one."""
    return _largest(gap for gap in own_gaps(comparison, side) if gap.kind == "sampled")


def _largest(gaps: Iterable[Gap]) -> Gap | None:
    return max(gaps, key=lambda gap: (gap.mean_abs, gap.max_abs), default=None)


def tolerance(comparison: Comparison, gap: Gap) -> float:
    """Return the mean of |Δ| up to which the two of a gap agree."""
    return max((comparison.tolerances.get(name, 0.0) for name in (gap.one, gap.other)), default=0.0)


def size_of(comparison: Comparison) -> str:
    """Return how much was compared, as a clause: "480 tokens in 12 rows"."""
    tokens = max((gap.count for gap in comparison.gaps), default=0)
    rows = len(comparison.rows)
    return f"{tokens:,} token{'s' * (tokens != 1)} in {rows:,} row{'s' * (rows != 1)}"


def summary(comparison: Comparison) -> str:
    """Return the largest gap in one sentence, and how it compares with what is noise; "" without gaps."""
    gaps = between(comparison.gaps)
    if not gaps:
        return ""
    gap, allowed = gaps[0], tolerance(comparison, gaps[0])
    words = f"mean |Δ| {number(gap.mean_abs)} nats, the largest {number(gap.max_abs)}; {share(gap.outside)} of the "
    words += f"ratios outside [0.9, 1.1]; up to {number(allowed)} is their own noise"
    return f"{size_of(comparison)}: {words}"
