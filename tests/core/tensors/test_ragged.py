"""`Ragged`, compared with plain Python lists."""

from array import array
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import corelm
from corelm import Masks, Tokens
from corelm.backend.arguments import rows_of_ids
from corelm.tensors.ragged import Ragged
from helpers.each import each, examples

Rows = list[list[int]]

quick = settings(deadline=None, max_examples=examples(50))
lists = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=6)
some_lists = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=6)


@each("rows", [[[1, 2], [], [3]], [[4]], [[]]])
@each("code", ["q", "d", "f", "b"])
def test_arrays_hold_what_lists_hold(rows: Rows, code: str) -> None:
    arrays = [array(code, row) for row in rows]
    found = Ragged.from_list([*arrays, [7]], torch.float32)
    assert found.tolist() == [*rows, [7]] and found.values.dtype == torch.float32
    for row in arrays:
        row.extend(row[:1])
        row[:1] = array(code, [9] * len(row[:1]))
    # The values are copies.
    assert found.tolist() == [*rows, [7]]


def test_an_array_of_floats_is_no_row_of_ids() -> None:
    assert Ragged.from_list([array("q", [5, 17])]).values.dtype == torch.int64
    with pytest.raises(TypeError, match="whole numbers"):
        Ragged.from_list([array("d", [5.0, 17.0])])


@quick
@given(some_lists, st.data())
def test_scatter_fills_any_mask_in_row_order(rows: Rows, data: st.DataObject) -> None:
    width = max(map(len, rows)) + 2
    places = [sorted(data.draw(st.permutations(range(width)))[: len(row)]) for row in rows]
    mask = torch.tensor([[t in at for t in range(width)] for at in places])
    expected = [
        [dict(zip(at, row, strict=True)).get(t, 77) for t in range(width)] for at, row in zip(places, rows, strict=True)
    ]
    assert Ragged.from_list(rows).scatter(mask, 77).tolist() == expected


@quick
@given(lists)
def test_values_of_more_dimensions(rows: Rows) -> None:
    wide = [[[value, -value] for value in row] for row in rows]
    flat = torch.tensor([value for row in wide for value in row], dtype=torch.int64).reshape(-1, 2)
    ragged = Ragged(flat, torch.tensor([len(row) for row in rows], dtype=torch.int64))
    longest = max(map(len, rows), default=0)
    assert ragged.tolist() == wide
    assert ragged.to_padded(0, "left").tolist() == [[[0, 0]] * (longest - len(row)) + row for row in wide]
    assert ragged.repeat(2).tolist() == [row for row in wide for _ in range(2)]


@each(
    "through",
    [
        lambda rows: rows.to_padded(0.0, "left"),
        lambda rows: rows.select([1, 0]).values,
        lambda rows: rows.repeat(1).values,
        lambda rows: rows.join(Ragged.from_list([[], []], torch.float32)).values,
        lambda rows: rows.slice(torch.tensor([0, 0]), torch.tensor([9, 9])).values,
        lambda rows: Ragged.cat([rows]).values,
    ],
)
def test_gradients_reach_every_value(through: Callable[[Ragged], torch.Tensor]) -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (through(Ragged(values, torch.tensor([2, 1]))) ** 2).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, 4.0, 6.0]


@each(
    "build, message",
    [
        (lambda: Ragged(torch.arange(3), torch.tensor([1, 1])), "add up to 2, but there are 3"),
        (lambda: Ragged(torch.arange(1), torch.tensor([2, -1])), "lengths add up"),
        (lambda: Ragged(torch.arange(0), torch.tensor([1, -1])), "lengths add up"),
        (lambda: Ragged(torch.tensor(1), torch.tensor([1])), "values\\[total, ...\\]"),
        (lambda: Ragged.from_list([[1, 2]]).to_padded(0, width=1), "a row of 2 values does not fit into 1 columns"),
        (lambda: Ragged.from_list([[1]]).join(Ragged.from_list([])), "cannot join 1 rows with 0"),
    ],
)
def test_inconsistent_lengths_and_widths_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_join_mask_of_other_rows_is_refused() -> None:
    first, second = Ragged.from_list([[1], [2]]), Ragged.from_list([[3], [4, 5]])
    with pytest.raises(ValueError, match="join_mask"):
        first.join(second, first.join_mask(first))


@each("lengths", [torch.tensor([1.5, 0.5]), [1.5, 0.5], torch.tensor([True, True])])
def test_lengths_that_are_not_integers_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths are whole numbers"):
        Ragged(torch.tensor([1, 2]), lengths)


def test_values_are_read_in_their_own_dtype_and_not_in_torchs_default() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for rows in ([[0.1, 2], [1e300]], [torch.tensor([0.1, 2], dtype=torch.float64), [1e300]]):
            assert Ragged.from_list(rows, torch.float64).tolist() == [[0.1, 2.0], [1e300]]
    finally:
        torch.set_default_dtype(before)


# Any sequence of its methods, so that what is cached is checked as well -----------------------------------------------


wide_values = st.integers(-(2**40), 2**40)
wide_lists = st.lists(st.lists(wide_values, max_size=4), max_size=5)
sides = st.sampled_from(["left", "right"])
MOST = 40


class AgainstLists(RuleBasedStateMachine):
    rows: list[list[int]]
    ragged: Ragged

    @initialize(rows=wide_lists, as_tensors=st.booleans())
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
        other = [data.draw(st.lists(wide_values, max_size=2)) for _ in self.rows]
        ragged = Ragged.from_list(other)
        mask = self.ragged.join_mask(ragged)
        assert mask.tolist() == [[False] * len(a) + [True] * len(b) for a, b in zip(self.rows, other, strict=True)]
        joined = self.ragged.join(ragged, mask if given_mask else None)
        self.become(joined, [a + b for a, b in zip(self.rows, other, strict=True)])

    @rule(rows=wide_lists)
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

    @rule(side=sides, extra=st.integers(0, 2), filler=wide_values)
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


# Arrays that numpy calls read-only are taken without a warning of torch -----------------------------------------------


ROWS = [[5, 17], [300]]


def read_only(values):
    array = np.array(values)
    array.flags.writeable = False
    return array


@pytest.fixture
def every_warning():
    """Let torch warn each time and not once in a process; a warning fails the test."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("every_warning")
def test_torch_warns_of_them():
    with pytest.raises(UserWarning, match="not writable"):
        torch.as_tensor(read_only([1]))


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("every_warning")
@each("form", [list, tuple])
def test_rows_of_ids(form):
    rows = form(read_only(row) for row in ROWS)
    assert rows_of_ids(rows, "prompts").tolist() == ROWS
    assert [row.tolist() for row in Tokens.from_rows(prompt=rows).prompt] == ROWS


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("every_warning")
def test_dense_ids_masks_and_seeds():
    assert rows_of_ids(read_only([[5, 17], [8, 9]]), "prompts").tolist() == [[5, 17], [8, 9]]
    masks = Masks.from_rows(all_attention_mask=[read_only([True, False])])
    assert masks.all_attention_mask[0].tolist() == [True, False]
    with corelm.get_backend("toy") as backend:
        drawn = [backend.generate([[5], [6]], seeds=seeds).ids.tolist() for seeds in (read_only([3, 4]), [3, 4])]
    assert drawn[0] == drawn[1]
