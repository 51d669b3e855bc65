"""Sets of ids for each position of each row."""

import pytest
import torch

from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets
from helpers.each import each

ROWS = [[[5, 17], []], [], [[300], [1, 2, 3]]]


@pytest.fixture
def sets():
    return TokenSets.from_list(ROWS)


def test_lists_come_back(sets):
    assert sets.tolist() == ROWS
    assert len(sets) == 3
    assert sets.counts.tolist() == [[2, 0], [], [1, 3]]
    assert sets.flat.tolist() == [[5, 17], [], [300, 1, 2, 3]]


def test_flat_ids_and_counts_are_the_sets(sets):
    assert TokenSets.from_flat(sets.flat, sets.counts).tolist() == ROWS


def test_counts_of_another_row_are_refused(sets):
    shifted = Ragged(sets.flat.values, torch.tensor([1, 1, 4]))
    with pytest.raises(ValueError, match="counts of a row"):
        TokenSets.from_flat(shifted, sets.counts)


def test_chunks_are_the_inverse_of_cat(sets):
    parts = sets.chunks([1, 2])
    assert [part.tolist() for part in parts] == [ROWS[:1], ROWS[1:]]
    assert TokenSets.cat(parts).tolist() == ROWS
    parts[1].ids.values.fill_(9)
    assert sets.tolist() == ROWS


@each("rows", [[2, 0], [0, 0], [], torch.tensor([False, True, True])])
def test_rows_are_selected(sets, rows):
    numbers = rows.nonzero().flatten().tolist() if isinstance(rows, torch.Tensor) else rows
    assert sets.select(rows).tolist() == [ROWS[row] for row in numbers]


def test_positions_are_sliced(sets):
    assert sets.slice(torch.tensor([1, 0, 0]), torch.tensor([2, 0, 1])).tolist() == [[[]], [], [[300]]]


def test_rows_are_joined_position_after_position(sets):
    other = TokenSets.from_list([[[7]], [[8], [9]], []])
    joined = [[*first, *second] for first, second in zip(ROWS, other.tolist(), strict=True)]
    assert sets.join(other).tolist() == joined


def test_what_a_set_contains(sets):
    assert sets.contains(torch.tensor([17, 5, 300, 4])).tolist() == [True, False, True, False]


def test_sets_are_compared_position_by_position_in_any_order():
    ours = [[[5, 1], [2, 9], []], [[4, 3], [8, 7, 6], [1]]]
    theirs = [[[1, 5], [4, 3], []], [[9, 2], [6, 8, 7], []]]
    same = [{*one} == {*other} for a, b in zip(ours, theirs, strict=True) for one, other in zip(a, b, strict=True)]
    assert TokenSets.from_list(ours).same_as(TokenSets.from_list(theirs)).tolist() == same
    assert TokenSets.from_list(ours).same_as(TokenSets.from_list(ours)).all()


def test_empty_sets():
    assert TokenSets.empty(torch.tensor([2, 0])).tolist() == [[[], []], []]
    assert TokenSets.from_list([]).tolist() == []
