"""`SetLogits`: the logits of the ids in a set for each position, from the head's rows of these ids only.

Some positions are taken together, and the head's rows of all their ids are gathered once: one matrix product makes the
logits of every one of these positions with every one of these ids, and those of the sets are picked from it. That is
more products than there are ids, but it is a matrix product, and its sums are rounded like those of the whole head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corelm.spec import Ragged

#: Positions taken together: fewer waste less of the product, more make better use of the device.
_CPU_POSITIONS, _POSITIONS = 64, 256
#: The largest product, and the most numbers of the head that are copied at a time: 16 MiB of float32 on a CPU.
_CPU_ELEMENTS, _ELEMENTS = 2**22, 2**25


@dataclass(frozen=True, eq=False)
class _Block:
    """Positions that are taken together.

    Attributes:
        positions: where they are.
        pairs: where their pairs of a position and an id are.
        ids: int64[m], the ids of their sets, each once, ascending.
        rows, columns: int64[pairs]: the place of the position of each pair among `positions`, of its id in `ids`.
    """

    positions: slice
    pairs: slice
    ids: Tensor
    rows: Tensor
    columns: Tensor


class SetLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, sets: Ragged, dtype: torch.dtype
    ) -> Tensor:
        """Return float32[total] (float64 of float64): the bare product of a state and a row of the head, with the bias,
        rounded to the dtype of the head, for each value of `sets`.

        Args:
            hidden: ``[n, hidden]``.
            weight: ``[vocab, hidden]``.
            bias: ``[vocab]`` or None.
            sets: n rows of ids.
            dtype: of the head.
        """
        cast = hidden.to(dtype)
        out = cast.new_empty(len(sets.values), dtype=torch.promote_types(dtype, torch.float32))
        for block in _blocks(sets, weight):
            states = cast[block.positions]
            product = cast.new_empty(len(states), len(block.ids))
            for some, part in _parts(block, weight):
                out_of_part = product[:, some]
                # With the bias inside, so that a short product is rounded once, as in the model.
                added = out_of_part if bias is None else bias[block.ids[some]].to(dtype)
                torch.addmm(added, states, part.to(dtype).T, beta=float(bias is not None), out=out_of_part)
            out[block.pairs] = product[block.rows, block.columns].to(out.dtype)
        ctx.save_for_backward(cast, weight, bias, sets.values)
        ctx.dtype, ctx.hidden_dtype, ctx.lengths = dtype, hidden.dtype, sets.lengths
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        sets, dtype = Ragged(ids, ctx.lengths), ctx.dtype
        by_hidden = torch.zeros_like(hidden, dtype=upstream.dtype) if wants_hidden else None
        # Only the rows of ids in a set have a gradient. They are summed over all blocks before they are rounded.
        known, place = _distinct(ids, len(weight))
        by_rows = upstream.new_zeros(len(known), weight.shape[1]) if wants_weight else None
        for block in _blocks(sets, weight):
            states = hidden[block.positions]
            slope = upstream.new_zeros(len(states), len(block.ids))
            slope[block.rows, block.columns] = upstream[block.pairs]
            for some, part in _parts(block, weight):
                columns = slope[:, some].to(dtype)
                if by_hidden is not None:
                    by_hidden[block.positions] += columns @ part.to(dtype)
                if by_rows is not None:
                    by_rows.index_add_(0, place[block.ids[some]], (columns.T @ states).to(by_rows.dtype))
        by_weight = by_bias = None
        if by_rows is not None:
            by_weight = torch.zeros_like(weight)
            by_weight[known] = by_rows.to(weight.dtype)
        if wants_bias:
            by_bias = upstream.new_zeros(len(weight)).index_add_(0, ids, upstream).to(bias.dtype)
        by_hidden = None if by_hidden is None else by_hidden.to(ctx.hidden_dtype)
        return by_hidden, by_weight, by_bias, None, None


def _blocks(sets: Ragged, weight: Tensor) -> Iterator[_Block]:
    """Yield the positions of `sets` in blocks, of which the product takes a limited amount of memory."""
    cpu = weight.device.type == "cpu"
    positions, elements = (_CPU_POSITIONS, _CPU_ELEMENTS) if cpu else (_POSITIONS, _ELEMENTS)
    ends = sets.offsets.tolist()
    rows = sets.row_index.to(weight.device)
    bounds = _bounds(sets.lengths.tolist(), positions, elements, len(weight))
    for start, stop in pairwise(bounds):
        pairs = slice(ends[start], ends[stop])
        ids, place = _distinct(sets.values[pairs], len(weight))
        yield _Block(slice(start, stop), pairs, ids, rows[pairs] - start, place[sets.values[pairs]])


def _bounds(lengths: list[int], positions: int, elements: int, vocab_size: int) -> list[int]:
    """Return where blocks of positions begin, and the end of the last one.

    >>> _bounds([2, 2, 9, 9], 3, 20, 10)
    [0, 2, 4]
    """
    bounds, count, distinct = [0], 0, 0
    for place, length in enumerate(lengths):
        more = min(vocab_size, distinct + length)
        if count and (count == positions or (count + 1) * more > elements):
            bounds.append(place)
            count, more = 0, min(vocab_size, length)
        count, distinct = count + 1, more
    return [*bounds, len(lengths)] if count else bounds


def _distinct(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the ids that occur, ascending, and int64[vocab]: the place of each of them there."""
    # A table of the vocabulary takes less time than sorting.
    table = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    table[ids] = True
    found = table.nonzero()[:, 0]
    place = torch.empty(vocab_size, dtype=torch.int64, device=ids.device)
    place[found] = torch.arange(len(found), device=ids.device)
    return found, place


def _parts(block: _Block, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the head's rows of the ids of a block, some at a time, and where these are among the ids."""
    elements = _CPU_ELEMENTS if weight.device.type == "cpu" else _ELEMENTS
    size = max(1, elements // max(1, weight.shape[1]))
    for start in range(0, len(block.ids), size):
        ids = block.ids[start : start + size]
        yield slice(start, start + len(ids)), weight[ids]
