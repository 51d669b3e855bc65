"""The pictures of the report: how large the differences are, how often, and where."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from corelm.errors import printable
from corelm_compare.records import Comparison, Gap
from corelm_compare.report_text import number, pair, worst_own

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Smaller differences than this are drawn as 0. No dtype that logits come in resolves less.
_SMALLEST = 1e-9
#: Bins on each side of 0, and lines that a picture can hold.
_BINS, _MOST_LINES = 32, 6
#: A point of a cloud: many points on top of each other are darker.
_POINT: dict[str, Any] = {"s": 4, "alpha": 0.3, "linewidths": 0, "color": "C0"}


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
    own = [found for name in (gap.one, gap.other) if (found := worst_own(comparison, name)) is not None]
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
