"""A side's distance to itself: the same call twice, each row alone, another order, scores from a prompt's end on.

A difference between two sides means something only beyond these. A distance that is larger than rounding is a fault by
itself, whatever the other side says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corelm_compare.gaps import distance, measure
from corelm_compare.oracles import Rows
from corelm_compare.records import Cause, Experiment, GapKind
from corelm_compare.sides import OpenSide

_CACHE = "turn the engine's cache of prefixes off (enable_prefix_caching=False, disable_radix_cache=True)"
COMPANY_ADVICE = (
    "check attention mask, position ids and padding side of the engine's batches; until then send one row a call"
)


class OwnDistances:
    """What a side says about the same rows in different calls: four calls, and one for each row.

    Args:
        side: the side.
        rows: the rows.
        starts: from where on each row is scored late: the end of its prompt, for example.
        first: what it said of these rows when it was asked for the first time.

    Attributes:
        gaps: the distances.
        together: its numbers for all rows in one call.
        alone: its numbers for each row in a call of its own.
        again: its numbers when exactly the same call was made again.
        late: its numbers from the end of each prompt on.
    """

    def __init__(self, side: OpenSide, rows: Rows, starts: Sequence[int], first: list[Tensor]) -> None:
        self._side, self._rows, self.together = side, rows, first
        self.again = side.score(rows)
        self.alone = [side.score([row])[0] for row in rows]
        reordered = side.score(list(reversed(rows)))[::-1]
        # The first of the two may fill a cache of prefixes, which the second reads.
        side.score(rows, starts=starts)
        self.late = side.score(rows, starts=starts)
        kinds: list[tuple[GapKind, str, list[Tensor]]] = [
            ("again", "the same call again", self.again),
            ("company", "each row alone", self.alone),
            ("order", "the rows in another order", reordered),
            ("late_start", "from the end of the prompt on", self.late),
        ]
        self.gaps = [
            measure(kind, side.name, f"{side.name}, {words}", first, numbers, rows, side.spell)
            for kind, words, numbers in kinds
        ]

    def size(self, *kinds: GapKind) -> float:
        """Return the largest mean |Δ| of these distances."""
        return max(gap.mean_abs for gap in self.gaps if gap.kind in kinds)

    def noise(self, largest: float) -> float:
        """Return the largest distance that is not above `largest`, which would be a fault."""
        return max((gap.mean_abs for gap in self.gaps if gap.mean_abs <= largest), default=0.0)

    def best(self, noise: float) -> list[Tensor]:
        """Return the numbers that are least spoilt by what else the engine did: alone, if company changes them."""
        steady = self.size("again") <= noise
        return self.alone if steady and self.size("company", "order") > noise else self.together

    def faults(self, truth: Sequence[Tensor] | None, noise: float) -> tuple[list[Experiment], Cause | None]:
        """Return what was tried, and the cause that the distances show.

        A side that does not say the same twice is asked twice more.

        Args:
            truth: the numbers of a reference; None without one.
            noise: mean |Δ| that is rounding.
        """
        experiments = []
        kinds: list[tuple[str, GapKind, str, list[Tensor]]] = [
            ("prefix-cache", "again", "the same call again", self.again),
            ("company", "company", "each row alone", self.alone),
            ("prefix-cache", "late_start", "scores from the end of each prompt on", self.late),
        ]
        for id, kind, changed, numbers in kinds:
            before, after, size = 0.0, 0.0, self.size(kind)
            if truth is not None:
                asked = [n.where(torch.isfinite(m), torch.nan) for n, m in zip(self.together, numbers, strict=True)]
                before, after = distance(truth, asked)[0], distance(truth, numbers)[0]
            note = f"{size:.3g} nats a token from the first call"
            tokens = self.gaps[0].count
            experiments.append(
                Experiment(id, self._side.name, f"scores: {changed}", before, after, tokens, size > noise, note)
            )
        if self.size("again") > noise:
            return experiments, self._repeated(noise)
        if self.size("company", "order") > noise:
            return experiments, self._company(truth, noise)
        late = self.size("late_start")
        if late <= noise:
            return experiments, None
        evidence = (
            f"{self._side.name} scores what follows each prompt {late:.3g} nats a token from its own scores of the "
            "whole row: what it keeps of the prompt is not what it computes"
        )
        advice = f"{_CACHE}, or reset it after every update of the weights"
        return experiments, Cause("prefix-cache", self._side.name, "certain", evidence, advice, {"mean_abs": late})

    def _repeated(self, noise: float) -> Cause:
        name, third, fourth = self._side.name, self._side.score(self._rows), self._side.score(self._rows)
        first = distance(self.together, self.again)[0]
        later = max(distance(self.again, third)[0], distance(third, fourth)[0])
        figures = {"first_second": first, "later": later}
        if later <= noise:
            evidence = (
                f"{name} gives the second of two equal calls {first:.3g} nats a token from the first, and all later "
                f"ones as the second (at most {later:.2g} apart): it answers from a cache"
            )
            advice = f"{_CACHE}; if that helps, its cache is wrong"
            return Cause("prefix-cache", name, "certain", evidence, advice, figures)
        evidence = f"{name} gives every one of four equal calls other numbers, up to {later:.3g} nats a token apart"
        advice = (
            "look for dropout (model.eval()), sampling in the scores, or several engines with different weights behind "
            "one URL"
        )
        return Cause("not-deterministic", name, "certain", evidence, advice, figures)

    def _company(self, truth: Sequence[Tensor] | None, noise: float) -> Cause:
        name, size = self._side.name, self.size("company", "order")
        longest = max(map(len, self._rows))
        apart = [distance([a], [b])[0] for a, b in zip(self.alone, self.together, strict=True)]
        short = [each for each, row in zip(apart, self._rows, strict=True) if len(row) < longest]
        full = [each for each, row in zip(apart, self._rows, strict=True) if len(row) == longest]
        evidence = f"{name} scores a row {size:.3g} nats a token away from what it says of the row alone"
        if truth is not None:
            alone, together = distance(truth, self.alone)[0], distance(truth, self.together)[0]
            evidence += f"; from the reference it is {alone:.2g} alone and {together:.3g} in company"
        if short and full and max(full) <= noise < max(short):
            evidence += "; only rows that are shorter than the longest change, so padding takes part (side, position "
            evidence += "ids, mask)"
        return Cause("company", name, "certain", evidence, COMPANY_ADVICE, {"mean_abs": size})
