"""`Ragged`, compared with plain Python lists."""

from array import array
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
