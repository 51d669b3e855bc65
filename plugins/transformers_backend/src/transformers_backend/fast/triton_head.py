"""Two Triton kernels for a tile of logits: into the running sums of its rows, and into its gradient.

They are right and quick on an H100 (docs/verified.md): see `tiles.kernels_for`. This file imports Triton.
"""

# Triton reads the signatures of kernels itself.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

#: Columns that a program looks at together.
_BLOCK = 4096


@triton.jit
def _fold(product, columns, largest, total, chosen, width, factor, BLOCK: tl.constexpr):
    """One program a row: "Online normalizer calculation for softmax", Milakov and Gimelshein 2018, algorithm 3."""
    row = tl.program_id(0).to(tl.int64)
    start = product + row * width
    column = tl.load(columns + row)
    if (column >= 0) & (column < width):
        tl.store(chosen + row, tl.load(start + column).to(tl.float32) * factor)
    peak, mass = tl.load(largest + row), tl.load(total + row)
    for block in range(0, width, BLOCK):
        places = block + tl.arange(0, BLOCK)
        logits = tl.load(start + places, mask=places < width, other=0.0).to(tl.float32) * factor
        logits = tl.where(places < width, logits, -float("inf"))
        larger = tl.maximum(peak, tl.max(logits, axis=0))
        mass = mass * tl.exp(peak - larger) + tl.sum(tl.exp(logits - larger), axis=0)
        peak = larger
    tl.store(largest + row, peak)
    tl.store(total + row, mass)


@triton.jit
def _gradient(product, columns, normalizer, upstream, width, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = product + row * width + places
    logits = tl.load(at, mask=places < width, other=0.0).to(tl.float32) * factor
    chosen = tl.where(places == tl.load(columns + row), 1.0, 0.0)
    slope = (chosen - tl.exp(logits - tl.load(normalizer + row))) * tl.load(upstream + row)
    tl.store(at, slope.to(product.dtype.element_ty), mask=places < width)


class ByTriton:
    """Reduces contiguous products of hidden states and some of the head's rows with these kernels.

    `product` is ``[rows, width]`` in the dtype of the head, and a logit is ``factor · product``; `columns` is
    int64[rows], the column of each row's token, which may lie outside the tile; other tensors are float32[rows].
    """

    def fold(
        self, product: Tensor, factor: float, columns: Tensor, largest: Tensor, total: Tensor, chosen: Tensor
    ) -> None:
        """Take a tile into what is known of its rows, in place: the exponentials so far, which sum to ``total ·
        exp(largest)``, and `chosen`, the logit of each row's token, if it was seen.
        """
        rows, width = product.shape
        _launch(_fold, (rows,), product, columns, largest, total, chosen, width, factor, BLOCK=_BLOCK)

    def gradient_(self, product: Tensor, factor: float, columns: Tensor, normalizer: Tensor, upstream: Tensor) -> None:
        """Overwrite `product` with ``upstream · (one-hot - softmax)``, given the log of each row's sum of exponentials
        and the gradient of each log-prob, times the factor.
        """
        rows, width = product.shape
        grid = rows, triton.cdiv(width, _BLOCK)
        _launch(_gradient, grid, product, columns, normalizer, upstream, width, factor, BLOCK=_BLOCK)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    tensors = [each for each in args if isinstance(each, Tensor)]
    if not all(each.is_contiguous() for each in tensors):
        raise ValueError("the kernels read contiguous tensors")
    if grid[0]:
        kernel[grid](*args, **options)
