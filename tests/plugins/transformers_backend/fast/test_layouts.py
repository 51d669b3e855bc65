"""Which rows share a forward pass, and where every position is found."""

from __future__ import annotations

import pytest
import torch

from corelm.tensors.ragged import Ragged
from transformers_backend.batches import micro_batches
from transformers_backend.fast.layouts import packed_batches, padded_batches
from transformers_backend.fast.segments import PackedSegment


def always(shared: int, rest: int) -> bool:
    return True


def test_a_common_start_is_packed_once() -> None:
    rows = Ragged.from_list([[5, 6, 7], [9], [5, 6, 8, 1], [5, 6, 8, 2], [5, 6]])
    (batch,) = packed_batches(rows, 99, 99, always)
    packed = batch.packed
    # In the order of their ids: 5 6 | 7 | 8 1 | 2 | 9.
    assert packed.ids.tolist() == [5, 6, 7, 8, 1, 2, 9] and packed.positions.tolist() == [0, 1, 2, 2, 3, 3, 0]
    assert packed.segments == (
        PackedSegment(0, 2),
        PackedSegment(2, 3, ((0, 2),)),
        PackedSegment(3, 5, ((0, 2),)),
        PackedSegment(5, 6, ((0, 2), (3, 4))),
        PackedSegment(6, 7),
    )
    assert batch.rows.tolist() == [4, 0, 2, 3, 1] and batch.shared == 7
    assert batch.index.tolist() == [[0, 1], [0, 1, 2], [0, 1, 3, 4], [0, 1, 3, 5], [6]]


def test_equal_rows_become_one_segment() -> None:
    (batch,) = packed_batches(Ragged.from_list([[5, 6], [5, 6], [5, 6]]), 99, 99, always)
    assert batch.packed.segments == (PackedSegment(0, 2),) and batch.index.tolist() == [[0, 1]] * 3


def test_a_start_is_not_shared_if_that_does_not_pay() -> None:
    (batch,) = packed_batches(Ragged.from_list([[5, 6], [5, 7]]), 99, 99, lambda shared, rest: shared > 1)
    assert batch.packed.segments == (PackedSegment(0, 2), PackedSegment(2, 4)) and batch.shared == 0


@pytest.mark.parametrize(
    ("limit", "max_shared", "sizes"), [(8, 8, [8, 5, 5]), (6, 9, [9, 5]), (1, 1, [5] * 4 + [6, 5])]
)
def test_packs_stay_within_their_limits(limit: int, max_shared: int, sizes: list[int]) -> None:
    rows = Ragged.from_list([[1, 1, 1, 1, n] for n in range(5)] + [[2] * 5])
    rows = rows if limit > 1 else Ragged.from_list([[n] * 5 for n in range(4)] + [[4] * 6, [5] * 5])
    batches = list(packed_batches(rows, limit, max_shared, always))
    assert torch.cat([batch.rows for batch in batches]).sort().values.tolist() == list(range(len(rows)))
    assert [len(batch.packed.ids) for batch in batches] == sizes


@pytest.mark.parametrize("seed", range(20))
def test_the_index_finds_every_position(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (12,), generator=generator)
    rows = Ragged(torch.randint(2, (int(lengths.sum()),), generator=generator), lengths)
    for batch in packed_batches(rows, 20, 20, lambda shared, rest: shared % 3 > 0):
        packed = batch.packed
        for row, index in zip(batch.rows.tolist(), batch.index.split(), strict=True):
            assert packed.ids[index].tolist() == rows.tolist()[row]
            assert packed.positions[index].tolist() == list(range(len(index)))
        # The slots before a segment are those of the earlier positions of the row that ends with it.
        for index in batch.index.tolist():
            for segment in (one for one in packed.segments if one.stop - 1 == index[-1]):
                before = [slot for start, stop in segment.before for slot in range(start, stop)]
                assert before + list(range(segment.start, segment.stop)) == index
    for batch in padded_batches(lengths, micro_batches(lengths, 20)):
        flat = rows.select(batch.rows).to_padded(-1).flatten()
        assert flat[batch.index.values].tolist() == rows.select(batch.rows).values.tolist()
