"""`SetLogits`: the logits of the ids in a set for each position, from the head's rows of these ids only.

Some positions are taken together, and the head's rows of all their ids are gathered once: one matrix product makes the
logits of every one of these positions with every one of these ids, and those of the sets are picked from it. That is
more products than there are ids, but it is a matrix product, and its sums are rounded like those of the whole head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corelm.spec import Ragged

#: The most positions that are taken together: fewer waste less of the product, more make better use of the device.
_CPU_POSITIONS, _POSITIONS = 64, 256
#: The largest product, and the most numbers of the head that are copied at a time: 16 MiB of float32 on a CPU.
_CPU_ELEMENTS, _ELEMENTS = 2**22, 2**25


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
        size, copied = _sizes(weight)
        for positions, pairs, ids, rows, columns in _blocks(sets, weight, size):
            states = cast[positions]
            product = cast.new_empty(len(states), len(ids))
            for some, made in zip(ids.split(copied), product.split(copied, 1), strict=True):
                # With the bias inside, so that a short product is rounded once, as in the model.
                added = made if bias is None else bias[some].to(dtype)
                torch.addmm(added, states, weight[some].to(dtype).T, beta=float(bias is not None), out=made)
            out[pairs] = product[rows, columns].to(out.dtype)
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
        size, copied = _sizes(weight)
        for positions, pairs, block, rows, columns in _blocks(sets, weight, size):
            states = hidden[positions]
            slope = upstream.new_zeros(len(states), len(block))
            slope[rows, columns] = upstream[pairs]
            for some, by_logits in zip(block.split(copied), slope.to(dtype).split(copied, 1), strict=True):
                if by_hidden is not None:
                    by_hidden[positions] += by_logits @ weight[some].to(dtype)
                if by_rows is not None:
                    by_rows.index_add_(0, place[some], (by_logits.T @ states).to(by_rows.dtype))
        by_weight = by_bias = None
        if by_rows is not None:
            by_weight = torch.zeros_like(weight)
            by_weight[known] = by_rows.to(weight.dtype)
        if wants_bias:
            by_bias = upstream.new_zeros(len(weight)).index_add_(0, ids, upstream).to(bias.dtype)
        by_hidden = None if by_hidden is None else by_hidden.to(ctx.hidden_dtype)
        return by_hidden, by_weight, by_bias, None, None


def _sizes(weight: Tensor) -> tuple[int, int]:
    """Return how many positions are taken together, and how many rows of the head are copied at a time."""
    cpu = weight.device.type == "cpu"
    positions, elements = (_CPU_POSITIONS, _CPU_ELEMENTS) if cpu else (_POSITIONS, _ELEMENTS)
    return max(1, min(positions, elements // len(weight))), max(1, elements // max(1, weight.shape[1]))


def _blocks(sets: Ragged, weight: Tensor, size: int) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yield which positions are taken together, which pairs of a position and an id they have, the ids of their sets,
    each once and ascending, and where each pair is in the table of these positions and ids, int64[pairs] each.
    """
    ends, rows = sets.offsets.tolist(), sets.row_index.to(weight.device)
    for start in range(0, len(sets), size):
        positions = slice(start, min(start + size, len(sets)))
        pairs = slice(ends[start], ends[positions.stop])
        ids, place = _distinct(sets.values[pairs], len(weight))
        yield positions, pairs, ids, rows[pairs] - start, place[sets.values[pairs]]


def _distinct(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the ids that occur, ascending, and int64[vocab]: the place of each of them there."""
    # A table of the vocabulary takes less time than sorting.
    table = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    table[ids] = True
    found = table.nonzero()[:, 0]
    place = torch.empty(vocab_size, dtype=torch.int64, device=ids.device)
    place[found] = torch.arange(len(found), device=ids.device)
    return found, place
