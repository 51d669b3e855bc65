"""`Ragged` against lists of lists: any sequence of its methods, so that what is cached is checked as well."""

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from corelm.tensors.ragged import Ragged
from helpers.each import each, examples

values = st.integers(-(2**40), 2**40)
lists = st.lists(st.lists(values, max_size=4), max_size=5)
sides = st.sampled_from(["left", "right"])
MOST = 40


class AgainstLists(RuleBasedStateMachine):
    rows: list[list[int]]
    ragged: Ragged

    @initialize(rows=lists, as_tensors=st.booleans())
    def make(self, rows: list[list[int]], as_tensors: bool) -> None:
        self.rows = rows
        self.ragged = Ragged.from_list([torch.tensor(row, dtype=torch.int64) for row in rows] if as_tensors else rows)

    def become(self, ragged: Ragged, rows: list[list[int]]) -> None:
        self.ragged, self.rows = ragged, rows

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        count = len(self.rows)
        picked = data.draw(st.lists(st.integers(-count, count - 1), max_size=6)) if count else []
        made = torch.tensor(picked, dtype=torch.int32) if data.draw(st.booleans()) else picked
        self.become(self.ragged.select(made), [self.rows[row] for row in picked])

    @rule(data=st.data())
    def select_by_mask(self, data: st.DataObject) -> None:
        keep = data.draw(st.lists(st.booleans(), min_size=len(self.rows), max_size=len(self.rows)))
        kept = torch.tensor(keep, dtype=torch.bool)
        self.become(self.ragged.select(kept), [row for row, one in zip(self.rows, keep, strict=True) if one])
        with pytest.raises(IndexError):
            self.ragged.select(torch.ones(len(self.rows) + 1, dtype=torch.bool))

    @rule(n=st.integers(0, 2))
    def repeat(self, n: int) -> None:
        if len(self.rows) <= MOST:
            self.become(self.ragged.repeat(n), [row for row in self.rows for _ in range(n)])

    @rule(data=st.data())
    def slice(self, data: st.DataObject) -> None:
        edges = [data.draw(st.tuples(st.integers(-2, 6), st.integers(0, 6))) for _ in self.rows]
        start, stop = (torch.tensor([edge[at] for edge in edges], dtype=torch.int64) for at in (0, 1))
        rows = [row[max(a, 0) : b] for row, (a, b) in zip(self.rows, edges, strict=True)]
        self.become(self.ragged.slice(start, stop), rows)

    @rule(data=st.data(), given_mask=st.booleans())
    def join(self, data: st.DataObject, given_mask: bool) -> None:
        other = [data.draw(st.lists(values, max_size=2)) for _ in self.rows]
        ragged = Ragged.from_list(other)
        mask = self.ragged.join_mask(ragged)
        assert mask.tolist() == [[False] * len(a) + [True] * len(b) for a, b in zip(self.rows, other, strict=True)]
        joined = self.ragged.join(ragged, mask if given_mask else None)
        self.become(joined, [a + b for a, b in zip(self.rows, other, strict=True)])

    @rule(rows=lists)
    def cat(self, rows: list[list[int]]) -> None:
        if len(self.rows) <= MOST:
            self.become(Ragged.cat([self.ragged, Ragged.from_list(rows)]), self.rows + rows)

    @rule()
    def with_values(self) -> None:
        self.become(self.ragged.with_values(-self.ragged.values), [[-value for value in row] for row in self.rows])
        with pytest.raises(ValueError, match="these rows hold"):
            self.ragged.with_values(torch.zeros(self.ragged.values.shape[0] + 1))

    @rule(data=st.data())
    def chunks_and_cat(self, data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, len(self.rows)))
        first, second = self.ragged.chunks([cut, len(self.rows) - cut])
        assert (first.tolist(), second.tolist()) == (self.rows[:cut], self.rows[cut:])
        if first.values.numel():
            first.values[0] = 7  # a copy
        for wrong in ([cut], [len(self.rows) + 1], [-1, len(self.rows) + 1]):
            if sum(wrong) != len(self.rows) or min(wrong) < 0:
                with pytest.raises(ValueError, match="numbers of rows"):
                    self.ragged.chunks(wrong)
        if len(self.rows):
            self.become(Ragged.cat(self.ragged.chunks([cut, len(self.rows) - cut])), self.rows)

    @rule()
    def clone(self) -> None:
        before = self.ragged
        self.become(before.clone(), self.rows)
        before.values.zero_()
        before.lengths.zero_()

    @rule(side=sides, extra=st.integers(0, 2), filler=values)
    def pad(self, side: Any, extra: int, filler: int) -> None:
        width = max(map(len, self.rows), default=0) + extra
        padded = self.ragged.to_padded(filler, side, width)
        pads = [[filler] * (width - len(row)) for row in self.rows]
        pairs = zip(pads, self.rows, strict=True)
        expected = [pad + row if side == "left" else row + pad for pad, row in pairs]
        assert padded.tolist() == (expected if width else [[] for _ in self.rows])
        mask = self.ragged.mask(side, width)
        assert torch.equal(self.ragged.scatter(mask, filler), padded)
        self.become(Ragged.from_padded(padded, mask), self.rows)
        with pytest.raises(ValueError, match="one place for each value"):
            self.ragged.scatter(torch.ones(len(self.rows) + 1, width, dtype=torch.bool), filler)

    @rule()
    def move(self) -> None:
        assert self.ragged.to(None) is self.ragged
        self.become(self.ragged.to("cpu"), self.rows)

    @invariant()
    def equal_to_the_lists(self) -> None:
        ragged, rows = self.ragged, self.rows
        lengths = list(map(len, rows))
        assert len(ragged) == len(rows) and ragged.lengths.tolist() == lengths
        assert ragged.values.tolist() == list(chain.from_iterable(rows))
        assert ragged.tolist() == rows and [row.tolist() for row in ragged.split()] == rows
        assert ragged.offsets.tolist() == [sum(lengths[:row]) for row in range(len(rows) + 1)]
        assert ragged.row_index.tolist() == [row for row, length in enumerate(lengths) for _ in range(length)]
        assert ragged.positions.tolist() == [at for length in lengths for at in range(length)]
        assert Ragged.full(ragged.lengths, 3, torch.int32).tolist() == [[3] * length for length in lengths]
        assert repr(ragged) == f"Ragged(rows={len(rows)}, total={sum(lengths)}, dtype=torch.int64)"


TestAgainstLists = AgainstLists.TestCase
TestAgainstLists.settings = settings(max_examples=examples(60), stateful_step_count=12, deadline=None)


@each("rows", [[[1.5]], [[1], [2.0]], [torch.tensor([1.5])], [torch.tensor([1]), torch.tensor([2.0])]])
def test_whole_numbers_are_not_cut_off(rows: Any) -> None:
    with pytest.raises(TypeError, match="expected whole numbers"):
        Ragged.from_list(rows)
    assert Ragged.from_list(rows, torch.float32).values.dtype == torch.float32


def test_a_mask_with_the_places_of_other_rows_is_refused() -> None:
    rows = Ragged.from_list([[1], [2, 3]])
    for mask in ([[True, True], [True, False]], [[True, False], [True, False]]):
        with pytest.raises(ValueError, match="one place for each value of a row"):
            rows.scatter(torch.tensor(mask), 0)
