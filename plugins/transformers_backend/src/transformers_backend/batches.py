"""Which rows share a forward pass, and where in it every position's state is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from corelm.spec import Ragged
from transformers_backend.model import micro_batches
from transformers_backend.packing import Segment

#: From the length of a shared beginning and of the rest: whether reading the beginning once pays.
Pays = Callable[[int, int], bool]


@dataclass(frozen=True, eq=False)
class Batch:
    """Some of the rows.

    Attributes:
        rows: int64[k], their numbers. index: for every position of each of them, its slot in the flat result.
        packed: ids and positions, int64[slots] each, and the segments they form; None where rows are padded right.
    """

    rows: Tensor
    index: Ragged
    packed: tuple[Tensor, Tensor, tuple[Segment, ...]] | None = None

    @property
    def shared(self) -> int:
        """Positions that need not be read, because another row has read them."""
        return 0 if self.packed is None else len(self.index.values) - len(self.packed[0])


def padded_batches(lengths: Tensor, max_tokens: int) -> Iterator[Batch]:
    """Rows of similar length, padded on the right to the longest; row r's position t is in slot ``r * width + t``."""
    for rows in micro_batches(lengths, max_tokens):
        own = lengths[rows]
        index = Ragged(torch.zeros(int(own.sum()), dtype=torch.int64), own)
        yield Batch(rows, Ragged(index.row_index * int(own.max()) + index.positions, own))


def packed_batches(rows: Ragged, max_tokens: int, max_family: int, pays: Pays) -> Iterator[Batch]:
    """Rows one after another, up to `max_tokens` of them, or one row that is longer.

    A row that begins as the one before it (in the order of their ids) need not read its beginning again, where that
    pays: it is a segment that starts later. Such rows stay together up to `max_family` tokens. ``[[5, 6, 7],
    [5, 6, 8]]`` become ids ``[5, 6, 7, 8]`` with the segments 0–3 and 3–4, the second after 0–2.
    """
    order, common = _in_order(rows)
    pack = _Pack()
    for row, shared in zip(order, common, strict=True):
        length = int(rows.lengths[row])
        shared = shared if shared and pays(shared, length - shared) else 0
        if pack.rows and pack.total + length - shared > (max_family if shared else max_tokens):
            yield pack.batch(rows)
            pack, shared = _Pack(), 0
        pack.add(row, length, shared)
    if pack.rows:
        yield pack.batch(rows)


class _Pack:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.total = 0
        self._segments: list[Segment] = []
        # The ranges that the latest row's positions lie in, in order; and for every row where all its positions lie.
        self._ranges: list[tuple[int, int]] = []
        self._index: list[Tensor] = []

    def add(self, row: int, length: int, shared: int) -> None:
        start, stop = self.total, self.total + length - shared
        before = _first(self._ranges, shared)
        index = torch.arange(start, stop)
        self._index.append(torch.cat([self._index[-1][:shared], index]) if shared else index)
        self.rows.append(row)
        self._ranges = before
        if stop > start:
            self._segments.append(Segment(start, stop, tuple(before)))
            self._ranges = [*before, (start, stop)]
        self.total = stop

    def batch(self, rows: Ragged) -> Batch:
        chosen = torch.tensor(self.rows)
        index = Ragged.from_list(self._index)
        picked = rows.select(chosen)
        ids, positions = (torch.empty(self.total, dtype=torch.int64) for _ in range(2))
        # Slots of a shared beginning are written more than once, each time with the same.
        ids[index.values], positions[index.values] = picked.values.cpu(), picked.positions
        return Batch(chosen, index, (ids, positions, tuple(self._segments)))


def _first(ranges: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The ranges cut to their first `count` positions."""
    ends = accumulate((stop - start for start, stop in ranges), initial=0)
    cut = [(start, min(stop, start + count - done)) for (start, stop), done in zip(ranges, ends, strict=False)]
    return [(start, stop) for start, stop in cut if stop > start]


def _in_order(rows: Ragged) -> tuple[list[int], list[int]]:
    """Row numbers sorted by ids, and how long a beginning each has in common with the row before it in that order."""
    values = rows.values.cpu().numpy()
    bounds = list(pairwise(rows.offsets.tolist()))
    # Big-endian: bytes then compare as the numbers do.
    keys = [values[start:stop].astype(">i8").tobytes() for start, stop in bounds]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [0]
    for one, other in pairwise(order):
        a, b = values[slice(*bounds[one])], values[slice(*bounds[other])]
        shorter = min(len(a), len(b))
        differs = a[:shorter] != b[:shorter]
        common.append(int(differs.argmax()) if differs.any() else shorter)
    return order, common[: len(order)]
