"""`Findings`: what a comparison has found so far, and `Clock`: how long it may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from corelm_compare.records import OUT_OF_TIME, Cause, Divergence, Experiment, Gap

#: Called with the current step and about how many seconds are left, or None while there is no estimate.
OnProgress = Callable[[str, float | None], object]


class Clock:
    """What a comparison does, how long it may take, and about how long it will.

    Args:
        budget: seconds after which nothing more is tried; None for no end.
        on_progress: is called before each step.
    """

    def __init__(self, budget: float | None = None, on_progress: OnProgress | None = None) -> None:
        self.budget, self._on_progress = budget, on_progress
        self._started = time.monotonic()
        self._end: float | None = None

    @property
    def seconds(self) -> float:
        """How long the comparison has taken."""
        return time.monotonic() - self._started

    @property
    def spent(self) -> bool:
        """Whether the budget is."""
        return self.budget is not None and self.seconds >= self.budget

    def expect(self, seconds: float) -> None:
        """Set how long the rest takes."""
        if self.budget is not None:
            seconds = min(seconds, max(self.budget - self.seconds, 0.0))
        self._end = self.seconds + seconds

    def step(self, doing: str) -> None:
        """Report the current step."""
        if self._on_progress is not None:
            self._on_progress(doing, None if self._end is None else max(self._end - self.seconds, 0.0))


@dataclass
class Findings:
    """Collects what the parts of a comparison find.

    Attributes:
        clock: of the comparison.
        own: each side's distances to itself.
        experiments, causes, divergences, not_tried, notes: as in `Comparison`.
        unexplained: whether a difference was found whose cause was not.
    """

    clock: Clock = field(default_factory=Clock)
    own: list[Gap] = field(default_factory=list)
    experiments: list[Experiment] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    not_tried: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unexplained: bool = False

    def may_try(self, name: str, doing: str) -> bool:
        """Report the next experiment and return True. If the budget is spent, note that `name` was not tried."""
        if self.clock.spent:
            self.not_tried.setdefault(name, f"{OUT_OF_TIME}{self.clock.budget:g} s was spent")
            return False
        self.clock.step(doing)
        return True

    def take(self, experiments: Sequence[Experiment], cause: Cause | None) -> bool:
        """Add what was tried, and the cause if one was found. Return whether one was."""
        self.experiments += experiments
        if cause is not None:
            self.causes.append(cause)
        return cause is not None

    def note(self, sentence: str) -> None:
        """Add a note, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def of(self, side: str) -> set[str]:
        """Return the ids of the causes that a side is accused of."""
        return {cause.id for cause in self.causes if cause.side == side}

    @property
    def ruled_out(self) -> tuple[str, ...]:
        """Names of causes that were tried to the end and do not explain a difference."""
        named = {*(cause.id for cause in self.causes), *self.not_tried}
        tried = dict.fromkeys(each.id for each in self.experiments if not each.explains)
        return tuple(name for name in tried if name not in named)

    @property
    def sorted_causes(self) -> tuple[Cause, ...]:
        """The causes, the surest first, each once for each side."""
        order = ("certain", "likely", "possible")
        unique: dict[tuple[str, str | None], Cause] = {}
        for cause in self.causes:
            unique.setdefault((cause.id, cause.side), cause)
        return tuple(sorted(unique.values(), key=lambda cause: order.index(cause.confidence)))
