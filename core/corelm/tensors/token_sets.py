"""`TokenSets`: a set of token ids for each position of each row, stored flat: a ragged tensor of ragged rows.

The sets of a row may have from none to as many ids as the vocabulary. A dense table would hold, for every position, as
many places as its largest set; this holds the ids and how many there are at each position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from corelm.tensors.ragged import Ragged


@dataclass(frozen=True, eq=False)
class TokenSets:
    """A set of ids for each position of each row.

    >>> sets = TokenSets.from_list([[[5, 17], []], [[300]]])
    >>> sets.ids.tolist(), sets.lengths.tolist()
    ([[5, 17], [], [300]], [2, 1])

    Attributes:
        ids: one row of ids per position, the positions of all rows one after another.
        lengths: int64[rows], on the CPU: the number of positions of each row.

    Raises:
        ValueError: the lengths do not add up to the number of positions.
    """

    ids: Ragged
    lengths: Tensor

    def __post_init__(self) -> None:
        # `Ragged` checks that the lengths are those of as many positions.
        object.__setattr__(self, "lengths", Ragged(self.ids.lengths, self.lengths).lengths)

    @classmethod
    def from_list(cls, rows: Iterable[Sequence[Sequence[int] | Tensor]]) -> TokenSets:
        """Build from nested lists: for each row, for each of its positions, the ids."""
        rows = list(rows)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls(Ragged.from_list([ids for row in rows for ids in row]), lengths)

    @classmethod
    def empty(cls, lengths: Tensor) -> TokenSets:
        """Return empty sets for rows of these `lengths`, int64[rows]."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(Ragged(nothing, torch.zeros(int(lengths.sum()), dtype=torch.int64)), lengths)

    @staticmethod
    def cat(parts: Sequence[TokenSets]) -> TokenSets:
        """Return the rows of all `parts`, one part after another."""
        return TokenSets(Ragged.cat([part.ids for part in parts]), torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __repr__(self) -> str:
        return f"TokenSets(rows={len(self)}, positions={len(self.ids)}, ids={self.ids.values.shape[0]})"

    @cached_property
    def counts(self) -> Ragged:
        """int64: the number of ids at each position, as rows."""
        return Ragged(self.ids.lengths, self.lengths)

    @cached_property
    def flat(self) -> Ragged:
        """int64: the ids of each row, those of all its positions one after another. `counts` tells them apart."""
        ends = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))
        return Ragged(self.ids.values, self.ids.offsets[ends].diff())

    @classmethod
    def from_flat(cls, flat: Ragged, counts: Ragged) -> TokenSets:
        """Build from `flat` and `counts`: the ids of each row, and how many of them belong to each position.

        Raises:
            ValueError: the counts of a row do not add up to its ids.
        """
        sets = cls(Ragged(flat.values, counts.values), counts.lengths)
        if not torch.equal(sets.flat.lengths, flat.lengths):
            raise ValueError("the counts of a row must add up to the number of its ids")
        return sets

    def clone(self) -> TokenSets:
        """Return the same sets in new storage."""
        return TokenSets(self.ids.clone(), self.lengths.clone())

    def to(self, device: torch.device | str | None) -> TokenSets:
        """Return the sets with their ids on `device`; None leaves them where they are."""
        return TokenSets(self.ids.to(device), self.lengths)

    def tolist(self) -> list[list[list[int]]]:
        """Return one list per row, with one list of ids per position."""
        sets, ends = self.ids.tolist(), self.counts.offsets.tolist()
        return [sets[start:end] for start, end in pairwise(ends)]

    def chunks(self, rows: Sequence[int]) -> list[TokenSets]:
        """Split into parts with these numbers of rows, each in new storage. The inverse of `cat`.

        Raises:
            ValueError: the numbers do not add up to the number of rows.
        """
        counts = self.counts.chunks(rows)
        parts = self.ids.chunks([part.values.shape[0] for part in counts])
        return [TokenSets(ids, part.lengths) for ids, part in zip(parts, counts, strict=True)]

    def select(self, rows: Sequence[int] | Tensor) -> TokenSets:
        """Return the rows with these numbers, or those where a bool mask is True; see `Ragged.select`."""
        return self._at(self._positions.select(rows))

    def slice(self, start: Tensor, stop: Tensor) -> TokenSets:
        """Return the sets at positions ``start[r] <= t < stop[r]`` of every row r.

        >>> sets = TokenSets.from_list([[[1], [2, 3]], [[4]]])
        >>> sets.slice(torch.tensor([1, 0]), torch.tensor([2, 9])).tolist()
        [[[2, 3]], [[4]]]
        """
        return self._at(self._positions.slice(start, stop))

    def join(self, other: TokenSets) -> TokenSets:
        """Return the rows ``self[r] + other[r]``, each with the positions of both.

        Raises:
            ValueError: the numbers of rows differ.
        """
        both = Ragged.cat([self.ids, other.ids])
        after = other._positions.with_values(other._positions.values + len(self.ids))
        order = self._positions.join(after)
        return TokenSets(both.select(order.values), order.lengths)

    def where(self, mask: Tensor) -> TokenSets:
        """Return the sets of the positions where ``bool[positions]`` is True, and empty ones elsewhere.

        >>> TokenSets.from_list([[[1], [2, 3]]]).where(torch.tensor([False, True])).tolist()
        [[[], [2, 3]]]
        """
        mask = mask.cpu()
        kept = self.ids.values[mask[self.ids.row_index].to(self.ids.values.device)]
        return TokenSets(Ragged(kept, self.ids.lengths * mask), self.lengths)

    def same_as(self, other: TokenSets) -> Tensor:
        """Return bool[positions], on the CPU: where both hold the same ids, in any order.

        >>> TokenSets.from_list([[[1, 5], [2]]]).same_as(TokenSets.from_list([[[5, 1], [3]]])).tolist()
        [True, False]

        Args:
            other: sets of as many positions.
        """
        same = self.ids.lengths == other.ids.lengths
        left, right = (ascending(sets.ids.to("cpu").select(same)) for sets in (self, other))
        differs = torch.zeros(len(left), dtype=torch.bool)
        differs[left.row_index[left.values != right.values]] = True
        return same.masked_scatter(same, ~differs)

    def contains(self, tokens: Tensor) -> Tensor:
        """Return bool[positions]: whether the set at each position has the id ``tokens[position]``.

        Args:
            tokens: int64[positions], one id per position, row after row.
        """
        found = self.ids.values == tokens.to(self.ids.values.device)[self.ids.row_index]
        marks = torch.zeros(len(self.ids), dtype=torch.bool)
        marks[self.ids.row_index[found.cpu()]] = True
        return marks

    @cached_property
    def _positions(self) -> Ragged:
        return Ragged(torch.arange(len(self.ids)), self.lengths)

    def _at(self, positions: Ragged) -> TokenSets:
        return TokenSets(self.ids.select(positions.values), positions.lengths)


def ascending(ids: Ragged) -> Ragged:
    """Return the ids of each row in ascending order."""
    values, row = ids.values, ids.row_index
    if not bool(((values.diff() < 0) & (row.diff() == 0)).any()):
        return ids
    order = values.argsort()
    return ids.with_values(values[order[row[order].argsort(stable=True)]])
