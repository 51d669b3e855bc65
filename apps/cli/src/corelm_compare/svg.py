"""`Plot`: a small picture as SVG. It is text that a page holds, and takes its colours from the page's style.

Nothing here grows with the number of points: lines and clouds are drawn on a grid of the picture's own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import torch
from torch import Tensor

from corelm.errors import printable
from corelm_compare.scales import Scale

#: The size in units of the picture, which is about as many pixels as it has on a phone.
WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 40
#: The side of the squares that a cloud is made of.
_CELL = 4
#: From how many points a square has its deepest colours.
_CROWDS = (1, 3, 10, 30)


class Plot:
    """A picture with two axes, to which marks are added in the order in which they are painted.

    Args:
        x, y: the scales.
        x_title, y_title: what is on the axes, and in which unit.
        described: the picture in one sentence, for those who hear the page.
        height: in units of the picture.
    """

    def __init__(
        self, x: Scale, y: Scale, x_title: str, y_title: str, described: str, height: int = HEIGHT, *, grid: bool = True
    ) -> None:
        self._x, self._y, self._height = x, y, height
        self._titles, self._described, self._grid = (x_title, y_title), described, grid
        self._marks: list[str] = []

    def line(self, xs: Tensor, ys: Tensor, look: str) -> None:
        """Add a line through points; `look` is a class of the page's style."""
        self._marks.append(f'<path class="line {look}" d="M{self._points(xs, ys)}"/>')

    def stairs(self, edges: Tensor, heights: Tensor, look: str, *, filled: bool = False) -> None:
        """Add the outline of a histogram.

        Args:
            edges: the ends of the bins, one more than there are bins.
            heights: how high each bin is.
            filled: whether the area below is filled.
        """
        xs, ys = edges.repeat_interleave(2)[1:-1], heights.repeat_interleave(2)
        points = self._points(xs, ys)
        if filled:
            floor = self._height - BOTTOM
            left, right = (round(self._across(place), 1) for place in (float(edges[0]), float(edges[-1])))
            self._marks.append(f'<path class="area {look}" d="M{left:g} {floor}L{points}L{right:g} {floor}Z"/>')
        else:
            self._marks.append(f'<path class="line {look}" d="M{points}"/>')

    def band(self, xs: Tensor, low: Tensor, high: Tensor, look: str) -> None:
        """Fill the area between two lines."""
        there, back = self._points(xs, high), self._points(xs.flip(0), low.flip(0))
        self._marks.append(f'<path class="band {look}" d="M{there}L{back}Z"/>')

    def cloud(self, xs: Tensor, ys: Tensor, look: str) -> None:
        """Add points: a square wherever there is one, the deeper in colour the more there are."""
        columns = ((self._x.places(xs) * self._inner_width) / _CELL).long()
        lines = ((self._y.places(ys) * self._inner_height) / _CELL).long()
        cells, counts = torch.stack([columns, lines]).unique(dim=1, return_counts=True)
        for level, least in enumerate(_CROWDS):
            most = _CROWDS[level + 1] if level + 1 < len(_CROWDS) else None
            chosen = (counts >= least) & (counts < most if most is not None else True)
            found = cells[:, chosen].T.tolist()
            if found:
                floor = self._height - BOTTOM - _CELL
                squares = "".join(
                    f"M{LEFT + _CELL * x} {floor - _CELL * y}h{_CELL}v{_CELL}h-{_CELL}z" for x, y in found
                )
                self._marks.append(f'<path class="cloud {look} crowd{level}" d="{squares}"/>')

    def rule(self, *, x: float | None = None, y: float | None = None, label: str = "", look: str = "rule") -> None:
        """Add a line across the picture at a value of one axis."""
        top, floor, right = TOP, self._height - BOTTOM, WIDTH - RIGHT
        if x is not None and self._x.low <= x <= self._x.high:
            at = self._across(x)
            self._marks.append(f'<path class="{look}" d="M{at:.1f} {floor}V{top}"/>')
            anchor, place = ("end", at - 3) if at > WIDTH / 2 else ("start", at + 3)
            if label:
                text = f'<text x="{place:.1f}" y="{floor - 6}" text-anchor="{anchor}">{escape(printable(label))}</text>'
                self._marks.append(text)
        if y is not None and self._y.low <= y <= self._y.high:
            self._marks.append(f'<path class="{look}" d="M{LEFT} {self._up(y):.1f}H{right}"/>')

    def slope(self, look: str = "rule") -> None:
        """Add the line on which both values are equal; both axes must be linear."""
        low, high = max(self._x.low, self._y.low), min(self._x.high, self._y.high)
        ends = torch.tensor([low, high])
        self._marks.append(f'<path class="{look}" d="M{self._points(ends, ends)}"/>')

    def bar(self, start: float, stop: float, line: float, thickness: float, look: str) -> None:
        """Add a bar from `start` to `stop`, whose middle is at the value `line` of the upright axis."""
        left, right = self._across(start), self._across(stop)
        top = self._up(line) - thickness / 2
        self._marks.append(
            f'<rect class="{look}" x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0.5):.1f}" '
            f'height="{thickness:.1f}"/>'
        )

    def svg(self) -> str:
        """Return the picture."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {self._height}" role="img" aria-label="{escape(printable(self._described))}">'
            f"{self._axes()}{''.join(self._marks)}</svg>"
        )

    # Places ----------------------------------------------------------------------------------------------------------

    @property
    def _inner_width(self) -> int:
        return WIDTH - LEFT - RIGHT

    @property
    def _inner_height(self) -> int:
        return self._height - TOP - BOTTOM

    def _across(self, value: float) -> float:
        return LEFT + self._x.place(value) * self._inner_width

    def _up(self, value: float) -> float:
        return self._height - BOTTOM - self._y.place(value) * self._inner_height

    def _points(self, xs: Tensor, ys: Tensor) -> str:
        across = (LEFT + self._x.places(xs) * self._inner_width).tolist()
        up = (self._height - BOTTOM - self._y.places(ys) * self._inner_height).tolist()
        return "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(across, up, strict=True))

    def _axes(self) -> str:
        floor, right = self._height - BOTTOM, WIDTH - RIGHT
        parts = [f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{right}"/>']
        for value, label in self._x.ticks():
            at = self._across(value)
            parts.append(f'<path class="tick" d="M{at:.1f} {floor}v4"/>')
            parts.append(f'<text x="{at:.1f}" y="{floor + 16}" text-anchor="middle">{label}</text>')
        for value, label in self._y.ticks():
            at = self._up(value)
            look, start = ("grid", f"M{LEFT} {at:.1f}H{right}") if self._grid else ("tick", f"M{LEFT} {at:.1f}h-4")
            parts.append(f'<path class="{look}" d="{start}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
        x_title, y_title = (escape(printable(title)) for title in self._titles)
        middle = TOP + self._inner_height / 2
        parts.append(f'<text class="title" x="{right}" y="{self._height - 6}" text-anchor="end">{x_title}</text>')
        turned = f'transform="translate(10 {middle:g}) rotate(-90)"'
        parts.append(f'<text class="title" {turned} text-anchor="middle">{y_title}</text>')
        return "".join(parts)


def key(entries: Sequence[tuple[str, str]]) -> str:
    """Return what the lines of a picture mean, as a list: pairs of a class of the style and a text."""
    items = (
        f'<li><svg class="swatch" viewBox="0 0 24 10" aria-hidden="true"><path class="line {look}" d="M0 5H24"/></svg>'
        f"{escape(printable(text))}</li>"
        for look, text in entries
    )
    return f'<ul class="key">{"".join(items)}</ul>' if entries else ""
