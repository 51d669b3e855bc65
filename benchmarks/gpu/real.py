"""`benchmarks.real` on a GPU: scoring and generation with a real model, and what its first calls cost."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.device import SIZES, Size
from benchmarks.measure import Figure
from benchmarks.real import DTYPES, RealModel


def figures(size: Size) -> Iterator[list[Figure]]:
    assert size.checkpoint is not None
    for dtype in DTYPES:
        yield from RealModel(size.checkpoint, dtype, quick=size.repeats < SIZES["short"].repeats).works()
