"""`Scale`: how values become places on an axis, linearly, by logarithm, or by logarithm on both sides of 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: More labels than these are hard to read on a phone.
_MOST_TICKS = 7
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis.

    Attributes:
        kind: `linear`; `log`, for values above 0; `symlog`, the logarithm of a value's size with its sign, and linear
            around 0.
        low, high: the values at both ends, ``low < high``.
        threshold: the size up to which `symlog` is linear, above 0.
        names: the labels of a linear axis and where they are; None for round numbers.
    """

    kind: Literal["linear", "log", "symlog"]
    low: float
    high: float
    threshold: float = 1.0
    names: tuple[tuple[float, str], ...] | None = None

    @classmethod
    def lines(cls, names: Sequence[str]) -> Scale:
        """Return a scale with a place for each name, the first at the top, where the value is ``len(names) - 1``."""
        step = math.ceil(len(names) / (2 * _MOST_TICKS))
        shown = [(len(names) - 1.0 - at, name) for at, name in enumerate(names) if at % step == 0]
        return cls("linear", -0.5, len(names) - 0.5, names=tuple(shown))

    @classmethod
    def linear(cls, low: float, high: float) -> Scale:
        """Return a linear scale from `low` to `high`; around them if they are equal."""
        return cls("linear", low, high) if high > low else cls("linear", low - 0.5, low + 0.5)

    @classmethod
    def log(cls, low: float, high: float) -> Scale:
        """Return a logarithmic scale whose ends are the powers of 10 around `low` and `high`, which are above 0."""
        ends = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return cls("log", 10.0 ** ends[0], 10.0 ** max(ends[1], ends[0] + 1))

    @classmethod
    def symlog(cls, size: float, threshold: float) -> Scale:
        """Return a scale from ``-size`` to ``size`` that is linear up to `threshold`. Both are above 0."""
        end = 10.0 ** math.ceil(math.log10(max(size, 10 * threshold)) - 1e-9)
        return cls("symlog", -end, end, threshold)

    def places(self, values: Tensor) -> Tensor:
        """Return the place of each value, float64: 0 at `low`, 1 at `high`, and no less and no more."""
        ends = self._moved(torch.tensor([self.low, self.high], dtype=torch.float64))
        return ((self._moved(values.double()) - ends[0]) / (ends[1] - ends[0])).clamp(0.0, 1.0)

    def place(self, value: float) -> float:
        """Return the place of one value."""
        return float(self.places(torch.tensor([value])))

    def values(self, count: int) -> Tensor:
        """Return `count` values at equal distances on the axis, both ends included, float64."""
        ends = self._moved(torch.tensor([self.low, self.high], dtype=torch.float64))
        moved = torch.linspace(float(ends[0]), float(ends[1]), count, dtype=torch.float64)
        if self.kind == "linear":
            return moved
        if self.kind == "log":
            return 10.0**moved
        return moved.sign() * self.threshold * (10.0 ** moved.abs() - 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the values that get a label, and the labels."""
        if self.names is not None:
            return list(self.names)
        if self.kind == "linear":
            return [(value, f"{value:g}".replace("-", "−")) for value in _round_values(self.low, self.high)]
        if self.kind == "log":
            powers = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
            step = math.ceil(len(powers) / _MOST_TICKS)
            return [(10.0**power, power_of_ten(power)) for power in powers[::-1][::step]][::-1]
        top, bottom = round(math.log10(self.high)), math.ceil(math.log10(self.threshold) + 0.5)
        step = max(1, math.ceil((top - bottom + 1) / (_MOST_TICKS // 2)))
        powers = range(top, bottom - 1, -step)
        sides = [[(sign * 10.0**power, word + power_of_ten(power)) for power in powers] for sign, word in _SIGNS]
        return [*sides[0], (0.0, "0"), *sides[1][::-1]]

    def _moved(self, values: Tensor) -> Tensor:
        if self.kind == "linear":
            return values
        if self.kind == "log":
            return values.clamp_min(1e-300).log10()
        return values.sign() * (1 + values.abs() / self.threshold).log10()


_SIGNS = ((-1, "−"), (1, ""))


def power_of_ten(power: int) -> str:
    """Return the label of a power of 10.

    >>> power_of_ten(-3), power_of_ten(0), power_of_ten(-1)
    ('10⁻³', '1', '0.1')
    """
    return {0: "1", 1: "10", -1: "0.1", -2: "0.01"}.get(power) or f"10{str(power).translate(_SUPERSCRIPTS)}"


def _round_values(low: float, high: float) -> list[float]:
    """Return round values from `low` to `high`, at equal distances."""
    rough = (high - low) / (_MOST_TICKS - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
