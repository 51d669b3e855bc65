"""`Ragged`: rows of different lengths as one flat tensor and their lengths. No padding, no Python loop per element."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

Side = Literal["left", "right"]


@dataclass(frozen=True, eq=False)
class Ragged:
    """`values[total, ...]` holds the rows one after another; `lengths[rows]` says where each ends.

    >>> rows = Ragged.from_list([[5, 17], [], [300]])
    >>> rows.values.tolist(), rows.lengths.tolist()
    ([5, 17, 300], [2, 0, 1])

    `values` may live on any device and carry gradients; `lengths` is int64 on the CPU.

    Raises:
        ValueError: the lengths are negative or do not add up to ``values.shape[0]``.
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        lengths = torch.as_tensor(self.lengths, dtype=torch.int64, device="cpu")
        object.__setattr__(self, "lengths", lengths)
        if lengths.ndim != 1 or self.values.ndim < 1:
            raise ValueError(
                "Ragged needs values[total, ...] and lengths[rows]; "
                f"got {tuple(self.values.shape)} and {tuple(lengths.shape)}"
            )
        total = int(lengths.sum())
        if total != self.values.shape[0] or (lengths.numel() and int(lengths.min()) < 0):
            raise ValueError(f"lengths add up to {total}, but there are {self.values.shape[0]} values")

    @classmethod
    def from_list(cls, rows: Iterable[Sequence[Any] | Tensor], dtype: torch.dtype = torch.int64) -> Ragged:
        """Build from lists or 1-D tensors, one per row. `dtype` applies to all of them."""
        rows = list(rows)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        if any(isinstance(row, Tensor) for row in rows):
            values = torch.cat([torch.as_tensor(row, dtype=dtype).reshape(-1) for row in rows])
        else:
            values = _flat(rows, dtype)
        return cls(values, lengths)

    @classmethod
    def from_padded(cls, padded: Tensor, mask: Tensor) -> Ragged:
        """Keep ``padded[rows, time, ...]`` where ``mask[rows, time]`` is True, row by row, in order."""
        return cls(padded[mask], mask.sum(-1).cpu())

    @classmethod
    def full(cls, lengths: Tensor, value: Any, dtype: torch.dtype) -> Ragged:
        """One `value` at every position of rows of these `lengths`."""
        return cls(torch.full((int(lengths.sum()),), value, dtype=dtype), lengths)

    @staticmethod
    def cat(parts: Sequence[Ragged]) -> Ragged:
        """The rows of all `parts`, one part after another."""
        return _unchecked(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def clone(self) -> Ragged:
        """Rows with storage of their own."""
        return _unchecked(self.values.clone(), self.lengths.clone())

    def chunks(self, rows: Sequence[int]) -> list[Ragged]:
        """So many rows each, with storage of their own: what `cat` puts together.

        >>> [part.tolist() for part in Ragged.from_list([[1, 2], [], [3]]).chunks([1, 2])]
        [[[1, 2]], [[], [3]]]
        """
        sizes = self.offsets[list(accumulate(rows, initial=0))].diff().tolist()
        parts = zip(self.values.split_with_sizes(sizes), self.lengths.split_with_sizes(list(rows)), strict=True)
        return [_unchecked(values.clone(), lengths.clone()) for values, lengths in parts]

    def with_values(self, values: Tensor) -> Ragged:
        """The same rows with other values, ``[total, ...]``.

        Raises:
            ValueError: there are more of them, or fewer.
        """
        if values.shape[:1] != self.values.shape[:1]:
            raise ValueError(f"rows of {self.values.shape[0]} values cannot hold {tuple(values.shape)}")
        return _unchecked(**{**self.__dict__, "values": values})

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __repr__(self) -> str:
        return f"Ragged(rows={len(self)}, total={self.values.shape[0]}, dtype={self.values.dtype})"

    @cached_property
    def offsets(self) -> Tensor:
        """int64[rows + 1]: row r is ``values[offsets[r]:offsets[r + 1]]``."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @cached_property
    def row_index(self) -> Tensor:
        """int64[total]: the row each value belongs to."""
        return torch.repeat_interleave(self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """int64[total]: the position of each value within its row."""
        return torch.arange(self.values.shape[0]) - self.offsets[:-1][self.row_index]

    def split(self) -> tuple[Tensor, ...]:
        """One tensor a row: views, no copies."""
        return self.values.split(self.lengths.tolist())

    def tolist(self) -> list[list[Any]]:
        flat, ends = self.values.tolist(), self.offsets.tolist()
        return [flat[start:end] for start, end in pairwise(ends)]

    def mask(self, side: Side = "right", width: int | None = None) -> Tensor:
        """bool[rows, width]: where `to_padded` of the same arguments puts values. `width` defaults to the longest
        row.
        """
        longest = int(self.lengths.max()) if len(self) else 0
        width = longest if width is None else width
        if width < longest:
            raise ValueError(f"a row of {longest} does not fit into {width} columns")
        columns = torch.arange(width)
        if side == "left":
            return columns >= (width - self.lengths)[:, None]
        return columns < self.lengths[:, None]

    def to_padded(self, padding_value: Any, side: Side = "right", width: int | None = None) -> Tensor:
        """``[rows, width, ...]`` with `padding_value` on the far side; gradients flow to `values`.

        >>> rows = Ragged.from_list([[1, 2], [3]])
        >>> rows.to_padded(0).tolist(), rows.to_padded(0, "left").tolist()
        ([[1, 2], [3, 0]], [[1, 2], [0, 3]])
        """
        return self.scatter(self.mask(side, width), padding_value)

    def scatter(self, mask: Tensor, filler: Any) -> Tensor:
        """``[rows, width, ...]``: the values where ``mask[rows, width]`` is True, row after row; `filler` elsewhere.

        The inverse of `from_padded`; gradients flow to `values`.
        """
        mask = mask.to(self.values.device)
        out = self.values.new_full((*mask.shape, *self.values.shape[1:]), filler)
        mask = mask.reshape(*mask.shape, *[1] * (self.values.ndim - 1)).expand_as(out)
        return out.masked_scatter_(mask, self.values)

    def select(self, rows: Sequence[int] | Tensor) -> Ragged:
        """The rows of these numbers, in the given order, repeats allowed; or those where a bool mask is True."""
        rows = torch.as_tensor(rows)
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows.to(torch.int64)
        lengths = self.lengths[rows]
        picked = torch.repeat_interleave(lengths)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
        index = torch.arange(int(lengths.sum())) - starts[picked] + self.offsets[:-1][rows][picked]
        return _unchecked(self.values[index.to(self.values.device)], lengths)

    def repeat(self, n: int) -> Ragged:
        """Every row `n` times, copies next to each other.

        >>> Ragged.from_list([[1, 2], [3]]).repeat(2).tolist()
        [[1, 2], [1, 2], [3], [3]]
        """
        return self.select(torch.arange(len(self)).repeat_interleave(n))

    def slice(self, start: Tensor, stop: Tensor) -> Ragged:
        """Positions ``start[r] <= t < stop[r]`` of every row r.

        >>> Ragged.from_list([[1, 2, 3], [4]]).slice(torch.tensor([1, 0]), torch.tensor([3, 9])).tolist()
        [[2, 3], [4]]
        """
        lengths = self.lengths
        start = torch.minimum(start.clamp_min(0), lengths)
        stop = torch.maximum(torch.minimum(stop, lengths), start)
        keep = runs((False, True, False), (start, stop - start, lengths - stop))
        return _unchecked(self.values[keep.to(self.values.device)], stop - start)

    def join_mask(self, other: Ragged) -> Ragged:
        """bool, as long as the rows of ``self.join(other)``: where `other`'s values stand in them.

        >>> Ragged.from_list([[1, 2], []]).join_mask(Ragged.from_list([[3], [4]])).tolist()
        [[False, False, True], [True]]
        """
        if len(self) != len(other):
            raise ValueError(f"cannot join {len(self)} rows with {len(other)}")
        return _unchecked(runs((False, True), (self.lengths, other.lengths)), self.lengths + other.lengths)

    def join(self, other: Ragged, join_mask: Ragged | None = None) -> Ragged:
        """Row by row ``self[r] + other[r]``. Whoever joins more of these lengths makes their `join_mask` once.

        >>> Ragged.from_list([[1, 2], []]).join(Ragged.from_list([[3], [4]])).tolist()
        [[1, 2, 3], [4]]
        """
        join_mask = self.join_mask(other) if join_mask is None else join_mask
        if join_mask.values.shape[0] != self.values.shape[0] + other.values.shape[0]:
            raise ValueError("this is the join_mask of other rows")
        second = join_mask.values.to(self.values.device)
        second = second.reshape(-1, *[1] * (self.values.ndim - 1))
        values = self.values.new_empty((second.shape[0], *self.values.shape[1:]))
        return join_mask.with_values(values.masked_scatter_(~second, self.values).masked_scatter_(second, other.values))

    def to(self, device: torch.device | str | None) -> Ragged:
        return self if device is None else self.with_values(self.values.to(device))


def _unchecked(values: Tensor, lengths: Tensor, **known: Tensor) -> Ragged:
    """Rows that need no check, being made of rows that had it: the check costs more than most of what is done to a few
    rows. `known`: properties of theirs.
    """
    rows = object.__new__(Ragged)
    rows.__dict__.update(known, values=values, lengths=lengths)
    return rows


def runs(flags: Sequence[bool], counts: Sequence[Tensor]) -> Tensor:
    """bool[total]: row after row, each of the flags as often as its ``counts[flag][row]`` says.

    >>> runs((False, True), (torch.tensor([1, 2]), torch.tensor([2, 0]))).tolist()
    [False, True, True, False, False]
    """
    each = torch.tensor(flags).expand(len(counts[0]), len(flags)).flatten()
    return each.repeat_interleave(torch.stack(tuple(counts), -1).flatten())


def _flat(rows: Sequence[Any], dtype: torch.dtype) -> Tensor:
    code = {torch.int64: "q", torch.float32: "f"}.get(dtype)
    if code:
        # A tenth of the time of torch.tensor, which takes whatever this does not.
        with suppress(TypeError, OverflowError):
            values = array(code)
            for row in rows:
                values.fromlist(row if isinstance(row, list) else list(row))
            if values:
                return torch.frombuffer(values, dtype=dtype)
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
