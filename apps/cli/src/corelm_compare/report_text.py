"""`as_text`: a comparison as a text for a terminal, which a person reads in ten seconds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from corelm.errors import printable
from corelm_compare.records import Cause, Comparison, Gap
from corelm_compare.report_words import KINDS, between, number, pair, share, summary, worst_own, worst_sampled

_INDENT = "  "
_HEADS = ("mean |Δ|", "p99", "largest", "outside", "mean Δ")
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
        yield from _cause(cause, width)
    if comparison.verdict == "unexplained":
        yield ""
        yield from _wrapped("The pictures of the report may show a pattern.", width)


def _cause(cause: Cause, width: int) -> Iterator[str]:
    side = "" if cause.side is None else f" in {cause.side}"
    yield from _wrapped(f"cause: {cause.id}{side} ({cause.confidence})", width)
    yield from _wrapped(cause.evidence, width, _INDENT)
    yield from _wrapped(f"→ {cause.advice}", width, _INDENT, _INDENT * 2)


def _distances(comparison: Comparison, width: int) -> Iterator[str]:
    lines = [(pair(gap), gap) for gap in between(comparison.gaps)[:_PAIRS]]
    lines += [(pair(gap), gap) for gap in comparison.gaps if gap.kind == "oracle"]
    for side in comparison.sides:
        own = (worst_own(comparison, side.name), worst_sampled(comparison, side.name))
        lines += [(f"{side.name}, {KINDS[gap.kind]}", gap) for gap in own if gap is not None]
    cells = [[printable(name), *_cells(gap)] for name, gap in lines]
    heads = ["Δ in nats", *_HEADS]
    widths = [max(len(row[column]) for row in [heads, *cells]) for column in range(1, len(heads))]
    room = max(_NAME, min(width - sum(widths) - 2 * len(widths), max(len(row[0]) for row in [heads, *cells])))
    yield ""
    for row in [heads, *cells]:
        names = textwrap.wrap(row[0], room) or [""]
        numbers = "".join(f"  {cell:>{size}}" for cell, size in zip(row[1:], widths, strict=True))
        yield f"{names[0]:<{room}}{numbers}"
        yield from (f"{_INDENT}{name}" for name in names[1:])


def _cells(gap: Gap) -> Sequence[str]:
    sizes = map(number, (gap.mean_abs, gap.p99, gap.max_abs))
    return [*sizes, share(gap.outside), number(gap.mean, sign=True)]


def _rest(comparison: Comparison, width: int) -> Iterator[str]:
    yield ""
    if comparison.ruled_out:
        yield from _wrapped(f"ruled out: {', '.join(comparison.ruled_out)}", width, "", _INDENT)
    for name, reason in comparison.not_tried.items():
        yield from _wrapped(f"not tried: {name}, {reason}", width, "", _INDENT)
    for note in comparison.notes:
        yield from _wrapped(f"note: {note}", width, "", _INDENT)
    yield from _wrapped(f"{comparison.calls} calls in {comparison.seconds:.3g} s", width)


def _wrapped(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """Return a text as lines of at most `width` characters; what is not printable becomes an escape sequence."""
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_on_hyphens=False,
    )
