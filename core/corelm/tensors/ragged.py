"""`Ragged`: rows of different lengths, as one flat tensor and the lengths. No padding, no Python loop per value."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from corelm.errors import refuse
from corelm.validate import invalid

Side = Literal["left", "right"]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths, stored one after another.

    >>> rows = Ragged.from_list([[5, 17], [], [300]])
    >>> rows.values.tolist(), rows.lengths.tolist()
    ([5, 17, 300], [2, 0, 1])

    Attributes:
        values: ``[total, ...]``: the values of all rows, on any device; may carry gradients.
        lengths: int64[rows], on the CPU: the number of values in each row.

    Raises:
        ValueError: the lengths are not integers, negative, or do not add up to ``values.shape[0]``.
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        # Attributes of tensors where they do: each call of torch lets another thread run, and there may be many.
        lengths = self.lengths
        if not isinstance(lengths, Tensor) or lengths.device.type != "cpu":
            lengths = torch.as_tensor(lengths, device="cpu")
        dtype = lengths.dtype
        if dtype != torch.int64:
            if lengths.numel() and (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
                raise ValueError(f"lengths are whole numbers, got {dtype}")
            lengths = lengths.to(torch.int64)
        object.__setattr__(self, "lengths", lengths)
        if lengths.ndim != 1 or self.values.ndim < 1:
            raise ValueError(
                "Ragged needs values[total, ...] and lengths[rows]; "
                f"got {tuple(self.values.shape)} and {tuple(lengths.shape)}"
            )
        some = lengths.tolist()
        total, least = sum(some), min(some, default=0)
        if total != self.values.shape[0] or least < 0:
            raise ValueError(f"lengths add up to {total}, but there are {self.values.shape[0]} values")

    @classmethod
    def from_list(cls, rows: Iterable[Sequence[Any] | Tensor], dtype: torch.dtype = torch.int64) -> Ragged:
        """Build from lists, arrays or 1-D tensors, one per row. All values get `dtype`.

        Raises:
            TypeError: a value does not fit `dtype`: a float among integers, which would be cut off.
        """
        rows = list(rows)
        lengths, values = torch.tensor(list(map(len, rows)), dtype=torch.int64), None
        # A list and no generator: Ctrl-C while a generator that is not exhausted is closed would be lost.
        if not {*map(type, rows)} <= {list, tuple, array} and any([isinstance(row, Tensor) for row in rows]):  # noqa: C419
            return cls(torch.cat([_made(row, dtype).reshape(-1) for row in rows]), lengths)
        if code := {torch.int64: "q", torch.float32: "f"}.get(dtype):
            # Takes a tenth of the time of torch.tensor, which handles everything that fails here.
            with suppress(TypeError, OverflowError):
                flat = array(code)
                for row in rows:
                    if isinstance(row, array):
                        flat.extend(row)
                    else:
                        flat.fromlist(row if isinstance(row, list) else list(row))
                values = torch.frombuffer(flat, dtype=dtype) if flat else None
        if values is None:
            values = _made([one for row in rows for one in row], dtype)
        made = object.__new__(cls)
        made.__dict__.update(values=values, lengths=lengths)
        return made

    @classmethod
    def from_padded(cls, padded: Tensor, mask: Tensor) -> Ragged:
        """Take the values of ``padded[rows, time, ...]`` where ``mask[rows, time]`` is True, in order."""
        return cls(padded[mask], mask.sum(-1).cpu())

    @classmethod
    def full(cls, lengths: Tensor, value: Any, dtype: torch.dtype) -> Ragged:
        """Return rows of these `lengths` with `value` at every position."""
        return cls(torch.full((int(lengths.sum()),), value, dtype=dtype), lengths)

    @staticmethod
    def cat(parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all `parts`, one part after another."""
        return _unchecked(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def clone(self) -> Ragged:
        """Return the same rows in new storage."""
        return _unchecked(self.values.clone(), self.lengths.clone())

    def chunks(self, rows: Sequence[int]) -> list[Ragged]:
        """Split into parts with these numbers of rows, each in new storage. The inverse of `cat`.

        Raises:
            ValueError: the numbers do not add up to the number of rows.

        >>> [part.tolist() for part in Ragged.from_list([[1, 2], [], [3]]).chunks([1, 2])]
        [[[1, 2]], [[], [3]]]
        """
        if sum(rows) != len(self) or any(count < 0 for count in rows):
            raise ValueError(f"expected numbers of rows that add up to {len(self)}, got {list(rows)}")
        sizes = self.offsets[list(accumulate(rows, initial=0))].diff().tolist()
        parts = zip(self.values.split_with_sizes(sizes), self.lengths.split_with_sizes(list(rows)), strict=True)
        return [_unchecked(values.clone(), lengths.clone()) for values, lengths in parts]

    def with_values(self, values: Tensor) -> Ragged:
        """Return rows of the same lengths with other values, ``[total, ...]``.

        Raises:
            ValueError: the number of values differs.
        """
        if values.shape[:1] != self.values.shape[:1]:
            raise ValueError(f"these rows hold {self.values.shape[0]} values, got shape {tuple(values.shape)}")
        rows = object.__new__(Ragged)
        rows.__dict__.update(self.__dict__, values=values)
        return rows

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
        """Return one tensor per row: views, not copies."""
        return self.values.split(self.lengths.tolist())

    def tolist(self) -> list[list[Any]]:
        """Return one list per row."""
        flat, start = self.values.tolist(), 0
        rows: list[list[Any]] = []
        for length in self.lengths.tolist():
            rows.append(flat[start : start + length])
            start += length
        return rows

    def sums(self, values: Tensor | None = None) -> Tensor:
        """Return int64[rows]: the sum of each row of integers or bools, or of other `values` as long as these."""
        values = (self.values if values is None else values).cpu().long()
        return torch.zeros_like(self.lengths).index_add_(0, self.row_index, values)

    def mask(self, side: Side = "right", width: int | None = None) -> Tensor:
        """Return bool[rows, width]: where `to_padded` puts values, given the same arguments.

        Args:
            side: the side on which the pads go.
            width: the number of columns; by default the length of the longest row.

        Raises:
            ValueError: a row is longer than `width`.
        """
        longest = int(self.lengths.max()) if len(self) else 0
        width = longest if width is None else width
        if width < longest:
            raise ValueError(f"a row of {longest} values does not fit into {width} columns")
        columns = torch.arange(width)
        if side == "left":
            return columns >= (width - self.lengths)[:, None]
        return columns < self.lengths[:, None]

    def to_padded(self, padding_value: Any, side: Side = "right", width: int | None = None) -> Tensor:
        """Return ``[rows, width, ...]`` with `padding_value` on that side of each row; gradients flow to `values`.

        >>> rows = Ragged.from_list([[1, 2], [3]])
        >>> rows.to_padded(0).tolist(), rows.to_padded(0, "left").tolist()
        ([[1, 2], [3, 0]], [[1, 2], [0, 3]])
        """
        return self._scatter(self.mask(side, width), padding_value)

    def scatter(self, mask: Tensor, filler: Any) -> Tensor:
        """Return ``[rows, width, ...]``: the values, in order, where ``mask[rows, width]`` is True; `filler` elsewhere.

        The inverse of `from_padded`. Gradients flow to `values`.

        Raises:
            ValueError: the mask does not have as many places in each row as the row has values.
        """
        if not torch.equal(mask.sum(-1).cpu(), self.lengths):
            raise ValueError("the mask must have one place for each value of a row, in that row")
        return self._scatter(mask, filler)

    def _scatter(self, mask: Tensor, filler: Any) -> Tensor:
        mask = mask.to(self.values.device)
        out = self.values.new_full((*mask.shape, *self.values.shape[1:]), filler)
        mask = mask.reshape(*mask.shape, *[1] * (self.values.ndim - 1)).expand_as(out)
        return out.masked_scatter_(mask, self.values)

    def select(self, rows: Sequence[int] | Tensor) -> Ragged:
        """Return the rows with these numbers, in the given order, also several times, or those where a mask is True.

        Raises:
            IndexError: there is no row with such a number, or a mask has another length.
        """
        rows = torch.as_tensor(rows)
        if rows.dtype == torch.bool and rows.shape != self.lengths.shape:
            raise IndexError(f"expected a mask of {len(self)} rows, got one of shape {tuple(rows.shape)}")
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows.to(torch.int64)
        lengths = self.lengths[rows]
        picked = torch.repeat_interleave(lengths)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
        index = torch.arange(int(lengths.sum())) - starts[picked] + self.offsets[:-1][rows][picked]
        return _unchecked(self.values[index.to(self.values.device)], lengths)

    def first(self, count: int) -> Ragged:
        """Return the first `count` rows: views, not copies.

        >>> Ragged.from_list([[1, 2], [3], [4]]).first(2).tolist()
        [[1, 2], [3]]
        """
        lengths = self.lengths[:count]
        return _unchecked(self.values[: int(lengths.sum())], lengths)

    def repeat(self, n: int) -> Ragged:
        """Return every row `n` times, its copies next to each other.

        >>> Ragged.from_list([[1, 2], [3]]).repeat(2).tolist()
        [[1, 2], [1, 2], [3], [3]]
        """
        return self.select(torch.arange(len(self)).repeat_interleave(n))

    def slice(self, start: Tensor | None = None, stop: Tensor | None = None) -> Ragged:
        """Return the positions ``start[r] <= t < stop[r]`` of every row r; None for its beginning, or its end.

        >>> Ragged.from_list([[1, 2, 3], [4]]).slice(torch.tensor([1, 0]), torch.tensor([3, 9])).tolist()
        [[2, 3], [4]]
        """
        lengths = self.lengths
        start = torch.zeros_like(lengths) if start is None else torch.minimum(start.clamp_min(0), lengths)
        stop = lengths if stop is None else torch.maximum(torch.minimum(stop, lengths), start)
        keep = runs(MIDDLE, (start, stop - start, lengths - stop))
        return _unchecked(self.values[keep.to(self.values.device)], stop - start)

    def join_mask(self, other: Ragged) -> Ragged:
        """Return bool, as long as the rows of ``self.join(other)``: True where they hold the values of `other`.

        >>> Ragged.from_list([[1, 2], []]).join_mask(Ragged.from_list([[3], [4]])).tolist()
        [[False, False, True], [True]]
        """
        if self.lengths.shape != other.lengths.shape:
            raise ValueError(f"cannot join {len(self)} rows with {len(other)} rows; the numbers must be equal")
        return _unchecked(runs(SECOND, (self.lengths, other.lengths)), self.lengths + other.lengths)

    def join(self, other: Ragged, join_mask: Ragged | None = None) -> Ragged:
        """Return the rows ``self[r] + other[r]``.

        Args:
            join_mask: ``self.join_mask(other)``. Pass it to join several pairs of the same lengths faster.

        Raises:
            ValueError: the numbers of rows differ, or the mask belongs to rows of other lengths.

        >>> Ragged.from_list([[1, 2], []]).join(Ragged.from_list([[3], [4]])).tolist()
        [[1, 2, 3], [4]]
        """
        join_mask = self.join_mask(other) if join_mask is None else join_mask
        if join_mask.values.shape[0] != self.values.shape[0] + other.values.shape[0]:
            raise ValueError("join_mask was made for rows of other lengths; make it with self.join_mask(other)")
        second = join_mask.values.to(self.values.device).reshape(-1, *[1] * (self.values.ndim - 1))
        values = self.values.new_empty((second.shape[0], *self.values.shape[1:]))
        return join_mask.with_values(values.masked_scatter_(~second, self.values).masked_scatter_(second, other.values))

    def to(self, device: torch.device | str | None) -> Ragged:
        """Return the rows with their values on `device`; None leaves them where they are."""
        values = self.values if device is None else self.values.to(device)
        return self if values is self.values else self.with_values(values)


def _unchecked(values: Tensor, lengths: Tensor) -> Ragged:
    """Build rows without validating them, which costs more than most operations on a few rows."""
    rows = object.__new__(Ragged)
    rows.__dict__.update(values=values, lengths=lengths)
    return rows


#: Which of the runs of a row are marked: the second, or the one in the middle.
SECOND, MIDDLE = torch.tensor([False, True]), torch.tensor([False, True, False])


def runs(flags: Tensor, counts: Sequence[Tensor]) -> Tensor:
    """Return bool[total]: for each row in turn, each flag repeated ``counts[flag][row]`` times."""
    each = flags.expand(len(counts[0]), len(flags)).flatten()
    return each.repeat_interleave(torch.stack(tuple(counts), -1).flatten())


def value_range(values: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value: NaN if one is NaN, 0 if there are none."""
    if not values.numel():
        return 0, 0
    low, high = values.aminmax()
    return low.item(), high.item()


def as_tensor(given: Any) -> Tensor:
    """Return an array, or numbers, as a tensor; read-only arrays, such as those of a Parquet file, are copied.

    A tensor on the memory of a read-only array could write to it. torch warns of that, once in a process.
    """
    flags = getattr(given, "flags", None)
    return torch.as_tensor(given.copy() if getattr(flags, "writeable", True) is False else given)


def is_integer(values: Tensor) -> bool:
    """Return whether these are integers, and no bools."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def unreadable(values: Any) -> str:
    """Return why the values of a tensor cannot be read or indexed like those of a plain one; "" if they can.

    >>> unreadable(torch.zeros(2)), unreadable(torch.zeros(2, device="meta"))
    ('', 'a tensor on the meta device, which has no values')
    """
    if not isinstance(values, Tensor):
        return f"a {type(values).__name__}, which is not a tensor"
    if values.is_meta:
        return "a tensor on the meta device, which has no values"
    if values.is_nested or values.is_quantized or values.layout != torch.strided:
        kind = "nested" if values.is_nested else "quantized" if values.is_quantized else str(values.layout)
        return f"a {kind.removeprefix('torch.')} tensor, which is not dense"
    return ""


def _made(given: Any, dtype: torch.dtype) -> Tensor:
    """Return the values as `dtype`; an integer `dtype` takes no floats, which torch would cut off in silence."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        # Without a dtype, torch would read floats in its default one, which may be shorter.
        return torch.as_tensor(given, dtype=dtype)
    values = torch.as_tensor(given)
    if values.numel() and values.dtype.is_floating_point:
        raise TypeError(f"expected whole numbers for {dtype}, got {values.dtype}")
    return values.to(dtype)


_MASK = "expected True and False, or 1 and 0; got a mask"


def as_mask(given: Any, field: str) -> Tensor:
    """Return a mask as bool. It may hold zeros and ones, as transformers writes masks, and nothing else.

    An additive mask, 0 for tokens and −inf for pads, would mean the opposite as bool, and NaN would be True.
    """
    if why := unreadable(given):
        why = f"expected True and False, or 1 and 0; got {why}"
    elif given.dtype != torch.bool:
        odd = (given != 0) & (given != 1)
        if given.ndim == 2:
            rows = odd.any(-1).nonzero()[:, 0].tolist()
            refuse({row: f"{_MASK} that holds {given[row][odd[row]][0].item()}" for row in rows}, field)
        why = f"{_MASK} that holds {given[odd][0].item()}" if bool(odd.any()) else ""
    if why:
        raise invalid(field, why)
    mask: Tensor = given.to(torch.bool)
    return mask


def shape_of(given: Any) -> str:
    """Return the dtype and the shape of a tensor, or the type of anything else, for a message."""
    return f"{given.dtype}{list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__


def counted_positions(mask: Any, values: Tensor) -> Tensor:
    """Return bool, shaped like `values` and on their device: which positions count. All of them without a mask."""
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.shape != values.shape or mask.dtype.is_floating_point:
        raise invalid("mask", f"expected bool{list(values.shape)}, got {shape_of(mask)}")
    return mask.to(values.device, torch.bool)
