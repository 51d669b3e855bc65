"""A side's distance to itself: the same call twice, each row alone, another order, scores from a prompt's end on.

A difference between two sides means something only beyond these. A distance that is larger than rounding is a fault by
itself, whatever the other side says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from corelm_compare.gaps import distance, measure
from corelm_compare.oracles import Rows
from corelm_compare.records import Cause, Experiment, Gap
from corelm_compare.sides import OpenSide

_CACHE = "turn the engine's cache of prefixes off (enable_prefix_caching=False, disable_radix_cache=True)"


@dataclass
class OwnDistances:
    """What a side says about the same rows in different calls.

    Attributes:
        side: the side.
        rows: the rows.
        together: its numbers for all rows in one call.
        alone: its numbers for each row in a call of its own.
        gaps: the distances.
        repeats: the numbers of every time that exactly the same call was made.
        late: its numbers from the end of each prompt on.
    """

    side: OpenSide
    rows: Rows
    together: list[Tensor]
    alone: list[Tensor] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    repeats: list[list[Tensor]] = field(default_factory=list)
    late: list[Tensor] = field(default_factory=list)

    def size(self, kind: str) -> float:
        """Return mean |Δ| of one of the distances."""
        return max((gap.mean_abs for gap in self.gaps if gap.kind == kind), default=0.0)

    def noise(self, largest: float) -> float:
        """Return the largest distance that is not above `largest`, which would be a fault."""
        return max((gap.mean_abs for gap in self.gaps if gap.mean_abs <= largest), default=0.0)


def measure_own(side: OpenSide, rows: Rows, starts: Sequence[int], first: list[Tensor]) -> OwnDistances:
    """Ask a side for the same rows again in four ways: four calls, and one for each row.

    A side that does not say the same twice is asked twice more by `own_faults`.

    Args:
        side: the side.
        rows: the rows.
        starts: from where on each row is scored late: the end of its prompt, for example.
        first: what it said of these rows when it was asked for the first time.
    """
    together = first
    found = OwnDistances(side, rows, together, repeats=[together])

    def add(kind: str, words: str, numbers: Sequence[Tensor], first: Sequence[Tensor] = together) -> None:
        gap = measure(kind, side.name, f"{side.name}, {words}", first, numbers, rows, side.spell)  # type: ignore[arg-type]
        found.gaps.append(gap)

    found.repeats.append(side.score(rows))
    add("again", "the same call again", found.repeats[-1])
    found.alone = [side.score([row])[0] for row in rows]
    add("company", "each row alone", found.alone)
    add("order", "the rows in another order", side.score(list(reversed(rows)))[::-1])
    # The first of the two may fill a cache of prefixes, which the second reads.
    side.score(rows, starts=starts)
    found.late = side.score(rows, starts=starts)
    add("late_start", "from the end of the prompt on", found.late)
    return found


def own_faults(own: OwnDistances, truth: Sequence[Tensor] | None, noise: float) -> tuple[list[Experiment], list[Cause]]:
    """Return the causes that a side's distances to itself show.

    Args:
        own: the distances.
        truth: the numbers of a reference; None without one.
        noise: mean |Δ| that is rounding.
    """
    experiments: list[Experiment] = []
    causes: list[Cause] = []
    name = own.side.name
    tokens = own.gaps[0].count if own.gaps else 0
    for kind, changed, numbers in (
        ("again", "the same call again", own.repeats[1]),
        ("company", "each row alone", own.alone),
        ("late_start", "scores from the end of each prompt on", own.late),
    ):
        before, after = (_from(truth, own.together, numbers), _from(truth, numbers, numbers)) if truth else (0.0, 0.0)
        size = own.size(kind)
        note = f"{size:.3g} nats a token from the first call"
        experiments.append(
            Experiment(
                id={"again": "prefix-cache", "late_start": "prefix-cache"}.get(kind, kind),
                side=name,
                changed=f"scores: {changed}",
                before=before,
                after=after,
                tokens=tokens,
                explains=size > noise,
                note=note,
            )
        )
    if own.size("again") > noise:
        causes.append(_repeated(own, noise))
    elif max(own.size("company"), own.size("order")) > noise:
        causes.append(_company(own, truth, noise))
    if own.size("late_start") > noise and not causes:
        causes.append(
            Cause(
                id="prefix-cache",
                side=name,
                confidence="certain",
                evidence=f"{name} scores what follows each prompt {own.size('late_start'):.3g} nats a token from its "
                "own scores of the whole row: what it keeps of the prompt is not what it computes",
                advice=f"{_CACHE}, or reset it after every update of the weights",
                figures={"mean_abs": own.size("late_start")},
            )
        )
    return experiments, causes


def best_numbers(own: OwnDistances, noise: float) -> list[Tensor]:
    """Return the numbers that are least spoilt by what else the engine did: alone, if company changes them."""
    if own.size("again") > noise:
        return own.repeats[0]
    return own.alone if own.size("company") > noise or own.size("order") > noise else own.together


def _repeated(own: OwnDistances, noise: float) -> Cause:
    own.repeats += [own.side.score(own.rows), own.side.score(own.rows)]
    first, second, third, fourth = own.repeats[:4]
    later = max(distance(second, third)[0], distance(third, fourth)[0])
    figures = {"first_second": distance(first, second)[0], "later": later}
    if later <= noise:
        return Cause(
            id="prefix-cache",
            side=own.side.name,
            confidence="certain",
            evidence=f"{own.side.name} gives the second of two equal calls {figures['first_second']:.3g} nats a token "
            f"from the first, and all later ones as the second (at most {later:.2g} apart): it answers from a cache",
            advice=f"{_CACHE}; if that helps, its cache is wrong",
            figures=figures,
        )
    return Cause(
        id="not-deterministic",
        side=own.side.name,
        confidence="certain",
        evidence=f"{own.side.name} gives every one of four equal calls other numbers, up to {later:.3g} nats a token "
        "apart",
        advice="look for dropout (model.eval()), sampling in the scores, or several engines with different weights "
        "behind one URL",
        figures=figures,
    )


def _company(own: OwnDistances, truth: Sequence[Tensor] | None, noise: float) -> Cause:
    name, size = own.side.name, max(own.size("company"), own.size("order"))
    longest = max(map(len, own.rows))
    apart = [distance([a], [b])[0] for a, b in zip(own.alone, own.together, strict=True)]
    short = [each for each, row in zip(apart, own.rows, strict=True) if len(row) < longest]
    full = [each for each, row in zip(apart, own.rows, strict=True) if len(row) == longest]
    where = ""
    if short and full and max(full) <= noise < max(short):
        where = "; only rows that are shorter than the longest change, so padding takes part (side, position ids, mask)"
    right = ""
    if truth is not None:
        alone, together = distance(truth, own.alone)[0], distance(truth, own.together)[0]
        right = f"; from the reference it is {alone:.2g} alone and {together:.3g} in company"
    return Cause(
        id="company",
        side=name,
        confidence="certain",
        evidence=f"{name} scores a row {size:.3g} nats a token away from what it says of the row alone{right}{where}",
        advice="check attention mask, position ids and padding side of the engine's batches; until then send one row a "
        "call",
        figures={"mean_abs": size},
    )


def _from(truth: Sequence[Tensor] | None, numbers: Sequence[Tensor], where: Sequence[Tensor]) -> float:
    if truth is None:
        return 0.0
    kept = [torch.where(torch.isfinite(w), n, torch.nan) for n, w in zip(numbers, where, strict=True)]
    return distance(truth, kept)[0]
