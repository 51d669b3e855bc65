"""Which rows share a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

#: Which rows may share a forward pass: rows of any length, with padding; rows of the same length; or none.
Grouping = Literal["padded", "equal", "alone"]


def micro_batches(lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Yield the row numbers, int64[n], that share a forward pass: similar lengths together, longest first.

    Padding counts towards `max_tokens`. Lengths ``[2, 9, 3, 9]`` with 18 tokens give ``[1, 3]`` and ``[2, 0]``. A row
    longer than `max_tokens` goes alone.
    """
    order = lengths.argsort(descending=True, stable=True)
    while len(order):
        # The longest rows come first, so that a batch that does not fit into memory fails immediately.
        rows = max(1, max_tokens // max(1, int(lengths[order[0]])))
        yield order[:rows]
        order = order[rows:]


def rows_of_one_encoding(lengths: Tensor, rope_switch: int | None) -> Iterator[Tensor]:
    """Yield the row numbers, int64[n], that may share a forward pass without changing each other's position encoding.

    Args:
        lengths: int64[rows].
        rope_switch: see `CausalLM`.
    """
    if rope_switch is None:
        yield torch.arange(len(lengths))
        return
    for side in (lengths <= rope_switch, lengths > rope_switch):
        if bool(side.any()):
            yield side.nonzero()[:, 0]


def groups_of(lengths: Tensor, grouping: Grouping) -> Iterator[Tensor]:
    """Yield the row numbers, int64[n], that may share a forward pass, longest first."""
    if grouping == "padded":
        yield torch.arange(len(lengths))
        return
    order = lengths.argsort(descending=True, stable=True)
    if grouping == "alone":
        yield from order.split(1)
        return
    _, counts = lengths[order].unique_consecutive(return_counts=True)
    yield from order.split(counts.tolist())
