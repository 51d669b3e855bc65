"""The pictures of the report: how large the differences are, how often, and where.

Each function returns a figure of HTML, or "" if there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import torch
from torch import Tensor

from corelm.errors import printable
from corelm_compare.records import Comparison, Gap
from corelm_compare.report_words import number, pair, share, worst_own
from corelm_compare.scales import Scale
from corelm_compare.svg import BOTTOM, TOP, Plot, key

#: Smaller differences than this are drawn as 0. No dtype that logits come in resolves less.
_SMALLEST = 1e-9
_BINS = 64
#: How many lines a picture of tails can hold.
_MOST_LINES = 6
#: Rows in the picture of divergences.
_MOST_ROWS = 40
#: Where the ratio exp(Δ) leaves [0.9, 1.1].
_EDGE = 0.1


def histogram(comparison: Comparison, gap: Gap) -> str:
    """Draw how often each Δ is, with the sides' distances to themselves on top."""
    own = [found for name in (gap.one, gap.other) if (found := worst_own(comparison, name)) is not None]
    scale = _symlog(gap, own)
    if scale is None:
        return ""
    edges = scale.values(_BINS + 2)  # an even number, so that 0 is in the middle of a bin
    heights = _shares(gap.delta, edges)
    least = min([1 / max(len(gap.delta), 1), *(1 / max(len(found.delta), 1) for found in own)])
    plot = Plot(
        scale,
        Scale.log(least * 0.9, 1.0),
        "Δ in nats, logarithmic on both sides of 0",
        "share of tokens",
        f"Histogram of the differences of {pair(gap)}, from {number(float(gap.delta.min()))} to "
        f"{number(float(gap.delta.max()))} nats.",
    )
    plot.stairs(edges, heights, "s0", filled=True)
    lines = [("s0", pair(gap))]
    for place, found in enumerate(own, 1):
        look = f"own{place}"
        plot.stairs(edges, _shares(found.delta, edges), look)
        lines.append((look, found.other))
    return _figure(
        "How the differences are spread",
        plot.svg() + key(lines),
        f"{_lean(gap)} Where the filled area is wider than the lines, the sides differ by more than from themselves.",
    )


def tails(comparison: Comparison, gaps: Sequence[Gap]) -> str:
    """Draw which share of the tokens differs by at least so much, for each gap and each side's distance to itself."""
    named = [(pair(gap), gap) for gap in gaps[:_MOST_LINES] if len(gap.delta)]
    own = [worst_own(comparison, side.name) for side in comparison.sides]
    repeated = [(gap.other, gap) for gap in own if gap is not None and len(gap.delta)][:_MOST_LINES]
    sizes = [_sizes(gap) for _, gap in (*named, *repeated)]
    present = torch.cat(sizes) if sizes else torch.zeros(0)
    if not len(present):
        return ""
    x = Scale.log(max(float(present.quantile(0.01)), _SMALLEST), float(present.max()))
    least = min(1 / max(gap.count, 1) for _, gap in (*named, *repeated))
    plot = Plot(
        x, Scale.log(least * 0.9, 1.0), "|Δ| in nats", "share of tokens with at least this |Δ|",
        "; ".join(f"{name}: the largest difference is {number(gap.max_abs)} nats" for name, gap in (*named, *repeated)),
    )  # fmt: skip
    grid = x.values(120)
    lines = []
    for looks, found in (("s", named), ("own", repeated)):
        for place, (name, gap) in enumerate(found):
            look = f"{looks}{place if looks == 's' else place + 1}"
            points, shares = _exceeding(gap, grid)
            if len(points):
                plot.line(points, shares, look)
            exact = "" if len(_sizes(gap)) else ": exactly 0"
            lines.append((look, name + exact))
    plot.rule(x=_EDGE, label="ratio 0.9 or 1.1")
    return _figure(
        "The tails",
        plot.svg() + key(lines),
        "A line further to the right is a larger difference. A mean near 0 can hide a tail that clips every ratio.",
    )


def by_position(gap: Gap) -> str:
    """Draw Δ against the position in the row."""
    scale = _symlog(gap, [gap])
    if scale is None or not len(gap.positions):
        return ""
    last = int(gap.positions.max())
    plot = Plot(
        Scale.linear(0, max(last, 1)), scale, "position in the row", "Δ in nats",
        f"Differences of {pair(gap)} by position, from 0 to {last}.",
    )  # fmt: skip
    plot.rule(y=0.0)
    where, low, middle, high = _by_bin(gap, max(1, min(40, last + 1, gap.count // 15)))
    if len(where) > 1:
        plot.band(where, low, high, "s0")
    plot.cloud(gap.positions.double(), gap.delta, "s0")
    if len(where) > 1:
        plot.line(where, middle, "s1")
    return _figure(
        "Where in the row",
        plot.svg() + key([("s1", "median Δ"), ("band0", "9 of 10 tokens")]),
        "A drift to the right is a cache, a position or a context; a step is a window or a chunk; a constant width is "
        "rounding, a scale or other weights.",
    )


def against(gap: Gap) -> str:
    """Draw the log-probs of one side against those of the other."""
    if not len(gap.first):
        return ""
    both = torch.cat([gap.first, gap.second]).double()
    low = float(both.quantile(0.001)) if len(both) > 1000 else float(both.min())
    scale = Scale.linear(low, max(float(both.max()), 0.0))
    plot = Plot(
        scale, scale, f"log-prob of {gap.one}", f"log-prob of {gap.other}",
        f"Log-probs of {gap.other} against those of {gap.one}; equal ones are on the diagonal.",
    )  # fmt: skip
    plot.slope()
    plot.cloud(gap.first, gap.second, "s0")
    return _figure(
        "Side against side",
        plot.svg(),
        "On the diagonal both say the same. Another slope is a temperature or a scale, a bend is a cap, and a cloud "
        "without a shape is other tokens or other weights.",
    )


def divergences(comparison: Comparison, gap: Gap) -> str:
    """Draw the rows as bars, each with the place where the numbers first differ."""
    first: dict[int, int] = {}
    for each in comparison.divergences:
        if each.what == "numbers" and {each.one, each.other} == {gap.one, gap.other}:
            first[each.row] = min(each.position, first.get(each.row, each.position))
    rows = [(at, row) for at, row in enumerate(comparison.rows) if at in first]
    if not rows:
        return ""
    shown = rows[:_MOST_ROWS]
    longest = max(len(row.ids) for _, row in shown)
    step = max(4.5, min(16.0, 180 / len(shown)))
    plot = Plot(
        Scale.linear(0, longest), Scale.lines([str(at) for at, _ in shown]), "position in the row", "row",
        f"{len(first)} of {len(comparison.rows)} rows differ; the first position is marked in each.",
        height=round(TOP + BOTTOM + step * len(shown)), grid=False,
    )  # fmt: skip
    for line, (at, row) in enumerate(reversed(shown)):
        plot.bar(0, len(row.ids), line, step * 0.6, "row")
        plot.bar(0, row.prompt_length, line, step * 0.6, "prompt")
        plot.bar(first[at], first[at] + longest / 130, line, step * 0.95, "mark")
    more = f" The first {len(shown)} are shown." if len(shown) < len(rows) else ""
    return _figure(
        "Where rows first differ",
        plot.svg() + key([("prompt0", "prompt"), ("row0", "completion"), ("mark0", "first difference")]),
        f"{len(first)} of {len(comparison.rows)} rows differ by more than noise somewhere.{more}",
    )


# Numbers -------------------------------------------------------------------------------------------------------------


def _sizes(gap: Gap) -> Tensor:
    """Return |Δ| where it is not 0, float64."""
    size = gap.delta.double().abs()
    return size[size >= _SMALLEST]


def _symlog(gap: Gap, own: Sequence[Gap] = ()) -> Scale | None:
    """Return a scale for all of them, linear up to where half of a side's rounding is; None if there are no tokens.

    Rounding is then a bell, and what is larger than rounding lies outside it.
    """
    if not len(gap.delta):
        return None
    sizes = [_sizes(each) for each in (gap, *own)]
    median, *others = (float(size.median()) if len(size) else _SMALLEST for size in sizes)
    largest = max((float(size.max()) for size in sizes if len(size)), default=1e-6)
    return Scale.symlog(largest, max(min(median, max([median / 30, *others])), 10 * _SMALLEST))


def _shares(delta: Tensor, edges: Tensor) -> Tensor:
    """Return the share of the values that is in each bin."""
    counts = torch.histc(torch.bucketize(delta.double(), edges[1:-1]).double(), len(edges) - 1, 0, len(edges) - 2)
    return counts / max(len(delta), 1)


def _exceeding(gap: Gap, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return points of the grid up to the largest |Δ|, and the share of tokens with at least that |Δ|."""
    size = gap.delta.double().abs().sort().values
    if not len(size) or float(size[-1]) < _SMALLEST:
        return grid[:0], grid[:0]
    points = torch.cat([grid[grid < size[-1]], size[-1:]])
    below = torch.searchsorted(size, points, right=False)
    return points, (len(size) - below).double() / len(size)


def _by_bin(gap: Gap, bins: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the middle of each bin of positions, and the 5 %, 50 % and 95 % quantiles of Δ in it."""
    last = int(gap.positions.max()) + 1
    number_of = gap.positions * bins // last
    found = []
    for at in number_of.unique().tolist():
        inside = number_of == at
        quantiles = torch.quantile(gap.delta[inside].double(), torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
        found.append([float(gap.positions[inside].double().mean()), *quantiles.tolist()])
    where, low, middle, high = torch.tensor(found, dtype=torch.float64).T
    return where, low, middle, high


def _lean(gap: Gap) -> str:
    """Return in words whether one side's numbers are larger."""
    if not gap.count or not gap.mean_abs:
        return "No token differs."
    more = share(float((gap.delta > 0).double().mean()))
    other = escape(printable(gap.other))
    if abs(gap.mean) > 0.5 * gap.mean_abs:
        return f"The differences lean to one side: {other} gives the larger log-prob to {more} of the tokens."
    return f"The differences are on both sides of 0: {other} gives the larger log-prob to {more} of the tokens."


def _figure(title: str, body: str, caption: str) -> str:
    return f"<figure><h4>{title}</h4>{body}<figcaption>{caption}</figcaption></figure>"
