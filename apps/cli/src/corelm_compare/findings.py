"""`Findings`: what a comparison has found so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from corelm_compare.records import Cause, Divergence, Experiment, Gap


@dataclass
class Findings:
    """Collects what the parts of a comparison find.

    Attributes:
        own: each side's distances to itself.
        experiments, causes, divergences, not_tried, notes: as in `Comparison`.
        unexplained: whether a difference was found whose cause was not.
    """

    own: list[Gap] = field(default_factory=list)
    experiments: list[Experiment] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    not_tried: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unexplained: bool = False

    def take(self, experiments: Sequence[Experiment], cause: Cause | None) -> bool:
        """Add what was tried, and the cause if one was found. Return whether one was."""
        self.experiments += experiments
        if cause is not None:
            self.causes.append(cause)
        return cause is not None

    def add(self, other: Findings) -> None:
        """Add everything that another part has found."""
        self.own += other.own
        self.experiments += other.experiments
        self.causes += other.causes
        self.divergences += other.divergences
        self.not_tried |= other.not_tried
        self.notes += other.notes
        self.unexplained |= other.unexplained

    def note(self, sentence: str) -> None:
        """Add a note, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def of(self, side: str) -> set[str]:
        """Return the ids of the causes that a side is accused of."""
        return {cause.id for cause in self.causes if cause.side == side}

    @property
    def ruled_out(self) -> tuple[str, ...]:
        """Names of causes that were tried and do not explain a difference."""
        named = {cause.id for cause in self.causes}
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
