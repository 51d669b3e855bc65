"""`as_text`: a comparison as a text for a terminal; and the words and numbers that the page has as well."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from corelm.errors import printable
from corelm_compare.records import Comparison, Gap, GapKind, counted

#: What a distance of a side to itself compares.
KINDS: dict[GapKind, str] = {
    "again": "the same call again",
    "company": "each row alone",
    "order": "rows in another order",
    "late_start": "from the answer on",
    "sampled": "sampled / scored",
}
_INDENT = "  "
_HEADS = ("mean |Δ|", "limit", "p99", "largest", "outside", "mean Δ")
#: What the column `limit` of the table holds.
LIMIT = (
    "limit: the mean |Δ| up to which a line is noise. The verdict rests on the scores of two sides: their limit is the "
    "given tolerance, or twice what a side's scores move when it is asked again, and at least what float32 rounds; if "
    "they differ as their dtypes round, it is what the coarser one rounds. The limit of the other lines is what the "
    "side's own dtype rounds. sampled / scored: the log-probs that a side returned when it sampled, against its scores "
    "of the same tokens"
)
#: The narrowest name that the table leaves room for, and pairs of sides that are listed.
_NAME, _PAIRS = 16, 10


def as_text(comparison: Comparison, width: int = 80) -> str:
    """Return the verdict, then causes and what to do, then the distances, then what was ruled out.

    Args:
        width: characters of a line.
    """
    parts = (_top, _causes, _distances, _rest)
    return "\n".join(line for part in parts for line in part(comparison, max(width, 40))) + "\n"


def _top(comparison: Comparison, width: int) -> Iterator[str]:
    passed = "OK" if comparison.exit_code == 0 else "FAIL"
    yield from _wrapped(f"{passed}: {comparison.headline}", width)
    if line := summary(comparison):
        yield from _wrapped(line, width, _INDENT)


def _causes(comparison: Comparison, width: int) -> Iterator[str]:
    for cause in comparison.causes:
        yield ""
        side = "" if cause.side is None else f" in {cause.side}"
        yield from _wrapped(f"cause: {cause.id}{side} ({cause.confidence})", width)
        yield from _wrapped(cause.evidence, width, _INDENT)
        yield from _wrapped(f"→ {cause.advice}", width, _INDENT, _INDENT * 2)
    if comparison.verdict == "unexplained":
        yield ""
        yield from _wrapped("The pictures of the report may show a pattern.", width)


def _distances(comparison: Comparison, width: int) -> Iterator[str]:
    lines = [(pair(gap), gap) for gap in between(comparison.gaps)[:_PAIRS]]
    lines += [(pair(gap), gap) for gap in comparison.gaps if gap.kind == "oracle"]
    own = [gap for side in comparison.sides for gap in worst_own(comparison, side.name)]
    lines += [(f"{gap.one}, {KINDS[gap.kind]}", gap) for gap in own]
    cells = [[printable(name), *_cells(comparison, gap)] for name, gap in lines]
    heads = ["Δ in nats", *_HEADS]
    widths = [max(len(row[column]) for row in [heads, *cells]) for column in range(1, len(heads))]
    room = max(_NAME, min(width - sum(widths) - 2 * len(widths), max(len(row[0]) for row in [heads, *cells])))
    yield ""
    for row in [heads, *cells]:
        names = textwrap.wrap(row[0], room) or [""]
        numbers = "".join(f"  {cell:>{size}}" for cell, size in zip(row[1:], widths, strict=True))
        yield f"{names[0]:<{room}}{numbers}"
        yield from (f"{_INDENT}{name}" for name in names[1:])
    if lines:
        yield from _wrapped(LIMIT, width, "", _INDENT)
    if comparison.oracle is not None:
        yield from _wrapped(f"plain forward: transformers in float32, of {comparison.oracle}", width, "", _INDENT)


def _cells(comparison: Comparison, gap: Gap) -> Sequence[str]:
    sizes = map(number, (gap.mean_abs, limit(comparison, gap), gap.p99, gap.max_abs))
    return [*sizes, share(gap.outside), number(gap.mean, sign=True)]


def _rest(comparison: Comparison, width: int) -> Iterator[str]:
    yield ""
    if comparison.ruled_out:
        yield from _wrapped(f"ruled out: {', '.join(comparison.ruled_out)}", width, "", _INDENT)
    for name, reason in comparison.not_tried.items():
        yield from _wrapped(f"not tried: {name}, {reason}", width, "", _INDENT)
    for note in comparison.notes:
        yield from _wrapped(f"note: {note}", width, "", _INDENT)
    rates = [f"{side.name} {side.tokens / side.seconds:,.0f} tokens/s" for side in comparison.sides if side.seconds]
    yield from _wrapped(f"{comparison.calls} calls in {comparison.seconds:.3g} s: {', '.join(rates)}", width)


def _wrapped(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """Return a text as lines of at most `width` characters; what is not printable becomes an escape sequence."""
    # A number stays with its sign.
    lines = textwrap.wrap(
        printable(text).replace(" %", "\xa0%"),
        width,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_on_hyphens=False,
    )
    return [line.replace("\xa0", " ") for line in lines]


# Words and numbers that the page has as well ---


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
    return [gap for gap in comparison.own if gap.one == side]


def worst_own(comparison: Comparison, side: str) -> list[Gap]:
    """Return a side's largest distances to itself: among its scores, and between what it sampled and its scores."""
    own = own_gaps(comparison, side)
    kinds = ([gap for gap in own if (gap.kind == "sampled") is sampled] for sampled in (False, True))
    return [max(gaps, key=lambda gap: (gap.mean_abs, gap.max_abs)) for gaps in kinds if gaps]


def limit(comparison: Comparison, gap: Gap) -> float:
    """Return the mean of |Δ| up to which a gap is noise, or rounding if that is the verdict. See `Comparison`."""
    of_sides = comparison.oracle_limits if comparison.verdict == "rounding" else {}
    more = {"sides": of_sides, "oracle": comparison.oracle_limits}.get(gap.kind, comparison.limits)
    limits = {**comparison.tolerances, **more}
    return max(limits.get(name, 0.0) for name in (gap.one, gap.other))


def named(comparison: Comparison, side: str) -> str:
    """Return the name of a side with its dtype, if that is known."""
    dtype = next((each.dtype for each in comparison.sides if each.name == side), None)
    return side if dtype is None else f"{side} ({dtype})"


def summary(comparison: Comparison) -> str:
    """Return the largest gap in one sentence, and how it compares with what is noise; "" without gaps."""
    gaps = between(comparison.gaps)
    if not gaps:
        return ""
    gap, tokens = gaps[0], max(each.count for each in comparison.gaps)
    words = f"{tokens:,} token{'s' * (tokens != 1)} in {counted(comparison.rows)}, scored by "
    words += (
        f"{named(comparison, gap.one)} and {named(comparison, gap.other)}: mean |Δ| {number(gap.mean_abs)} nats, the "
    )
    words += (
        f"largest {number(gap.max_abs)}; {share(gap.outside)} of the ratios outside [0.9, 1.1]; between their scores, "
    )
    what = "rounding" if comparison.verdict == "rounding" else "noise"
    return f"{words}up to {number(limit(comparison, gap))} is {what}"
