"""`as_html`: a comparison as one page that needs no network and no script."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from corelm._version import __version__
from corelm.errors import printable
from corelm_compare.records import CAUSES, Comparison, Gap, Row
from corelm_compare.report_text import (
    LIMIT,
    between,
    limit,
    log_prob,
    number,
    own_gaps,
    pair,
    share,
    summary,
    worst_own,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Rows that are shown for each pair, tokens of each, tokens before the one that differs most, and shades of colour.
_ROWS, _TOKENS, _BEFORE, _SHADES = 5, 300, 100, 4
#: Characters of a token.
_CHARACTERS = 60
#: What is sooner worth a look.
_KINDS = ("conversation", "text", "ids")
#: Smaller differences than this are drawn as 0. No dtype that logits come in resolves less.
_SMALLEST = 1e-9
#: Bins on each side of 0, and lines that a picture can hold.
_BINS, _MOST_LINES = 32, 6
#: A point of a cloud: many points on top of each other are darker.
_POINT: dict[str, Any] = {"s": 4, "alpha": 0.3, "linewidths": 0, "color": "C0"}


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
        own=[gap for side in comparison.sides for gap in own_gaps(comparison, side.name)],
        worst_own=[gap for side in comparison.sides for gap in worst_own(comparison, side.name)],
        about_limits=LIMIT,
        # Those of ids and answers first: they are few, and explain the others.
        divergences=sorted(comparison.divergences, key=lambda each: each.what == "numbers"),
        limit=lambda gap: limit(comparison, gap),
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
    look = _shades(gap, limit(comparison, gap))
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
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _token(text: str) -> Markup:
    """Return the text of a token as HTML that shows what cannot be seen."""
    shown = text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"
    return escape(printable(shown.replace("\n", "⏎\n"), keep="\n") or "∅")


def _ratio(delta: float) -> float:
    return math.exp(min(delta, 700.0))


# Pictures: how large the differences are, how often, and where --------------------------------------------------------


class Picture(NamedTuple):
    """A picture of the page.

    Attributes:
        title: what it shows.
        described: the same in a sentence with figures, for those who hear the page.
        png: the picture, in base64.
        caption: what to look for.
    """

    title: str
    described: str
    png: str
    caption: str


def pictures(comparison: Comparison, gap: Gap) -> list[Picture]:
    """Draw a gap between two sides; nothing if it has no tokens, or matplotlib is not installed."""
    if not len(gap.delta):
        return []
    plain = [each for each in comparison.gaps if each.kind == "oracle"]
    own = [each for name in (gap.one, gap.other) for each in worst_own(comparison, name) if each.kind != "sampled"]
    largest = f"the largest difference of {pair(gap)} is {number(gap.max_abs)} nats"
    drawn: list[tuple[str, str, str, Callable[[Axes], None]]] = [
        (
            "How the differences are spread",
            f"Histogram: {largest}, {number(float((gap.delta > 0).double().mean()))} of them are above 0.",
            "Where the filled area is wider than the lines, the sides differ by more than from themselves.",
            lambda axes: _histogram(axes, gap, own),
        ),
        (
            "The tails",
            f"The share of tokens that differ by at least so much: {largest}.",
            "A line further to the right is a larger difference. A mean near 0 can hide a tail that clips every ratio.",
            lambda axes: _tails(axes, [gap, *plain], own),
        ),
        (
            "Where in the row",
            f"Differences by position, from 0 to {int(gap.positions.max())}: {largest}.",
            "A drift to the right is a cache, a position or a context; a step is a window or a chunk; a constant width "
            "is rounding, a scale or other weights.",
            lambda axes: _by_position(axes, gap),
        ),
        (
            "Side against side",
            f"Log-probs of {gap.other} against those of {gap.one}: {largest}.",
            "On the diagonal both say the same. Another slope is a temperature or a scale, a bend is a cap, and a "
            "cloud without a shape is other tokens or other weights.",
            lambda axes: _against(axes, gap),
        ),
    ]
    try:
        return [Picture(title, words, _png(draw), caption) for title, words, caption, draw in drawn]
    except ImportError:
        return []


def _png(draw: Callable[[Axes], None]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    # Names of sides are texts, not formulas, and may be in a script that the font lacks.
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure, file = Figure(figsize=(5.2, 3.6), layout="constrained"), io.BytesIO()
        axes = figure.subplots()
        draw(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small")
        figure.savefig(file, format="png", dpi=90, metadata={"Software": None})
    return base64.b64encode(file.getvalue()).decode()


def _histogram(axes: Axes, gap: Gap, own: Sequence[Gap]) -> None:
    """Draw how often each Δ is, with the sides' distances to themselves on top."""
    median = _linear(gap)
    sizes = torch.logspace(0, 1, _BINS, dtype=torch.float64).log10()
    largest = max([10 * median, *(each.max_abs for each in (gap, *own))])
    sizes = median * (largest / median * 1.001) ** sizes
    edges = torch.cat([-sizes.flip(0), sizes])
    for each in (gap, *own):
        counts = torch.histogram(each.delta.double(), edges).hist / len(each.delta)
        name = pair(gap) if each is gap else each.other
        axes.stairs(
            counts.numpy(), edges.numpy(), fill=each is gap, alpha=0.5 if each is gap else 1, label=printable(name)
        )
    axes.set_xscale("symlog", linthresh=median)
    axes.set(yscale="log", xlabel="Δ in nats", ylabel="share of tokens")


def _tails(axes: Axes, gaps: Sequence[Gap], own: Sequence[Gap]) -> None:
    """Draw which share of the tokens differs by at least so much, for each gap and each side's distance to itself."""
    for each in (*gaps[:_MOST_LINES], *own):
        name, look = (each.other, "--") if each in own else (pair(each), "-")
        if each.max_abs > _SMALLEST:
            size = each.delta.double().abs().clamp_min(_SMALLEST)
            axes.ecdf(size.numpy(), complementary=True, label=printable(name), linestyle=look)
    axes.axvline(0.1, color="0.6", linestyle=":", label="ratio 0.9 or 1.1")
    axes.set(xscale="log", yscale="log", xlabel="|Δ| in nats", ylabel="share of tokens with at least this |Δ|")


def _by_position(axes: Axes, gap: Gap) -> None:
    axes.scatter(gap.positions.numpy(), gap.delta.numpy(), **_POINT)
    axes.set_yscale("symlog", linthresh=_linear(gap))
    axes.set(xlabel="position in the row", ylabel="Δ in nats")


def _against(axes: Axes, gap: Gap) -> None:
    axes.scatter(gap.first.numpy(), gap.second.numpy(), **_POINT)
    axes.axline((0, 0), slope=1, color="0.6", linestyle=":")
    axes.set(xlabel=printable(f"log-prob of {gap.one}"), ylabel=printable(f"log-prob of {gap.other}"))


def _linear(gap: Gap) -> float:
    """Return up to which size an axis of Δ is linear: half of the tokens differ by less."""
    return max(gap.median_abs, 10 * _SMALLEST)
