"""Which rows share a forward pass of the model's body, and where the hidden state of every position is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from corelm.spec import Ragged
from transformers_backend.fast.attention import PackedSegment

#: Given the lengths of a common start and of the rest of a row: whether reading the start only once pays.
SharingPays = Callable[[int, int], bool]


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows one after another in one row of slots.

    Attributes:
        ids: int64[slots].
        positions: int64[slots].
        segments: which slots attend to which.
    """

    ids: Tensor
    positions: Tensor
    segments: tuple[PackedSegment, ...]


@dataclass(frozen=True, eq=False)
class ReadBatch:
    """Rows that are read together.

    Attributes:
        rows: int64[k], their numbers.
        index: for every position of each of them, its slot in the flat result.
        columns: the width of the forward pass.
        packed: the packed rows; None if rows are padded on the right.
    """

    rows: Tensor
    index: Ragged
    columns: int
    packed: PackedRows | None = None

    @property
    def shared(self) -> int:
        """Number of positions that are not read because another row has read them."""
        return 0 if self.packed is None else len(self.index.values) - self.columns


def padded_batches(lengths: Tensor, batches: Iterable[Tensor]) -> Iterator[ReadBatch]:
    """Yield rows padded on the right to the longest of their batch.

    Position t of row r is in slot ``r * width + t``.

    Args:
        lengths: int64[rows].
        batches: the numbers of the rows in each batch, int64[n].
    """
    for rows in batches:
        own = lengths[rows]
        index = Ragged.full(own, 0, torch.int64)
        columns = int(own.max())
        yield ReadBatch(rows, index.with_values(index.row_index * columns + index.positions), columns)


def packed_batches(rows: Ragged, max_tokens: int, max_shared: int, pays: SharingPays) -> Iterator[ReadBatch]:
    """Yield rows packed one after another, up to `max_tokens` of them, or one row that is longer.

    Rows are sorted by their ids. If a row starts like the one before it and `pays` says so, the start is not read
    again: the row becomes a segment that begins after it. Such rows stay together up to `max_shared` tokens.
    ``[[5, 6, 7], [5, 6, 8]]`` become ids ``[5, 6, 7, 8]`` with the segments 0–3 and 3–4, the second after 0–2.
    """
    order, common = _in_order(rows)
    pack, lengths = _PackBuilder(), rows.lengths.tolist()
    for row, shared in zip(order, common, strict=True):
        length = lengths[row]
        shared = shared if shared and pays(shared, length - shared) else 0
        if pack.rows and pack.total + length - shared > (max_shared if shared else max_tokens):
            yield pack.build(rows)
            pack, shared = _PackBuilder(), 0
        pack.add(row, length, shared)
    if pack.rows:
        yield pack.build(rows)


class _PackBuilder:
    """Collects rows for one pack.

    Attributes:
        rows: their numbers. total: number of slots so far.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.total = 0
        self._segments: list[PackedSegment] = []
        # The slot ranges of the latest row's positions, in order; and for every row the slots of all its positions.
        self._ranges: list[tuple[int, int]] = []
        self._index: list[Tensor] = []

    def add(self, row: int, length: int, shared: int) -> None:
        """Add a row whose first `shared` positions are those of the latest row."""
        start, stop = self.total, self.total + length - shared
        before = _first(self._ranges, shared)
        index = torch.arange(start, stop)
        self._index.append(torch.cat([self._index[-1][:shared], index]) if shared else index)
        self.rows.append(row)
        self._ranges = before
        if stop > start:
            self._segments.append(PackedSegment(start, stop, tuple(before)))
            self._ranges = [*before, (start, stop)]
        self.total = stop

    def build(self, rows: Ragged) -> ReadBatch:
        chosen = torch.tensor(self.rows)
        index = Ragged.from_list(self._index)
        picked = rows.select(chosen)
        ids, positions = (torch.empty(self.total, dtype=torch.int64) for _ in range(2))
        # The slots of a shared start are written more than once, each time with the same values.
        ids[index.values], positions[index.values] = picked.values.cpu(), picked.positions
        return ReadBatch(chosen, index, self.total, PackedRows(ids, positions, tuple(self._segments)))


def _first(ranges: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return the ranges cut to their first `count` positions."""
    ends = accumulate((stop - start for start, stop in ranges), initial=0)
    cut = [(start, min(stop, start + count - done)) for (start, stop), done in zip(ranges, ends, strict=False)]
    return [(start, stop) for start, stop in cut if stop > start]


def _in_order(rows: Ragged) -> tuple[list[int], list[int]]:
    """Return row numbers sorted by ids, and how many first ids each row has in common with the one before it."""
    values = rows.values.cpu().numpy()
    bounds = list(pairwise(rows.offsets.tolist()))
    # In big-endian order, bytes compare as the numbers do.
    keys = [values[start:stop].astype(">i8").tobytes() for start, stop in bounds]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [0]
    for one, other in pairwise(order):
        a, b = values[slice(*bounds[one])], values[slice(*bounds[other])]
        shorter = min(len(a), len(b))
        differs = a[:shorter] != b[:shorter]
        common.append(int(differs.argmax()) if differs.any() else shorter)
    return order, common[: len(order)]
