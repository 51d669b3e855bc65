"""`measure`: two scorings of the same tokens become a `Gap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from corelm.kl import k3
from corelm_compare.records import Gap, GapKind, WorstToken

#: One tensor a row, float32[len(row)]; NaN where there is no number.
Numbers = Sequence[Tensor]
#: Returns the text of an id.
Spell = Callable[[int], str]

#: Ratios outside these are counted: the bounds that the published figures use.
LOW, HIGH = 0.9, 1.1
#: How many of the tokens that differ most are listed.
_LISTED = 10


def measure(
    kind: GapKind, one: str, other: str, first: Numbers, second: Numbers, ids: Sequence[Sequence[int]], spell: Spell
) -> Gap:
    """Return how far `second` is from `first`, over the tokens that both scored."""
    a, b = flat(first), flat(second)
    there, here = torch.isfinite(a), torch.isfinite(b)
    both = there & here
    lengths = torch.tensor([len(row) for row in first], dtype=torch.int64)
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)[both]
    positions = flat([torch.arange(len(row)) for row in first]).long()[both]
    before, after = a[both], b[both]
    delta = after - before
    size = delta.abs()
    quantiles = [0.0] * 4
    if len(delta):
        quantiles = torch.quantile(size.double(), torch.tensor([0.5, 0.9, 0.99, 0.999], dtype=torch.float64)).tolist()
    ratio = delta.exp()

    worst = []
    for index in size.argsort(descending=True, stable=True)[:_LISTED].tolist():
        row, position = int(rows[index]), int(positions[index])
        token = int(ids[row][position])
        pair = {"one": float(before[index]), "other": float(after[index])}
        worst.append(WorstToken(row=row, position=position, token_id=token, token=spell(token), **pair))
    return Gap(
        kind=kind,
        one=one,
        other=other,
        count=len(delta),
        skipped=int((there ^ here).sum()),
        mean=mean(delta),
        mean_abs=mean(size),
        median_abs=quantiles[0],
        p90=quantiles[1],
        p99=quantiles[2],
        p999=quantiles[3],
        max_abs=float(size.max()) if len(size) else 0.0,
        outside=mean(((ratio < LOW) | (ratio > HIGH)).float()),
        k3=mean(k3(before, after)) if len(delta) else 0.0,
        worst=tuple(worst),
        delta=delta,
        rows=rows,
        positions=positions,
        first=before,
        second=after,
    )


def mean(values: Tensor) -> float:
    """Return the mean; 0 of no values."""
    return float(values.double().mean()) if len(values) else 0.0


def distance(first: Numbers, second: Numbers) -> tuple[float, int]:
    """Return the mean of |Δ| over the tokens that both scored, and how many they are; 0.0 if there are none."""
    a, b = flat(first), flat(second)
    size = (a - b).abs()
    size = size[torch.isfinite(size)]
    return mean(size), len(size)


def flat(rows: Numbers) -> Tensor:
    """Return the numbers of all rows, one row after the other."""
    return torch.cat([row.float() for row in rows]) if rows else torch.zeros(0)
