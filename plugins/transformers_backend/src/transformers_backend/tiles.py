"""Log-probabilities of chosen tokens straight from hidden states: a tile of logits at a time, in one buffer.

No tensor here is as wide as the vocabulary. A tile is the product of a block of hidden states and a range of the head's
rows; the maximum and the sum of a softmax are kept up while tiles pass ("Online normalizer calculation for softmax",
Milakov and Gimelshein 2018, algorithm 3), and a token's own logit is taken from the tile that holds it. Going backward
the tiles are made again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Tokens × vocabulary entries of a tile: 4 MiB of float32 on a CPU, which stays in its cache; 128 MiB elsewhere, so
#: that a GPU has enough to do with each.
_CPU_TILE, _TILE = (1024, 1024), (2048, 16384)


@dataclass(frozen=True, eq=False)
class LinearHead:
    """Logits ``scale · (hidden · weightᵀ + bias)``, of which a `cap` makes ``cap · tanh(logits / cap)``.

    `weight` is [vocab, hidden], `bias` [vocab] or None.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    cap: float | None = None

    def logprobs(self, hidden: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """float32[n]: log-softmax of the logits over `temperature` of ``hidden[n, hidden]``, at ``tokens`` int64[n].

        Gradients flow to hidden, weight and bias, once; what is kept for them is the arguments and n numbers. Sums are
        made in float32, or float64 if `hidden` is.
        """
        out: Tensor = _ChosenLogprobs.apply(hidden, self.weight, self.bias, tokens, (self.scale, self.cap, temperature))
        return out


class _Tiles:
    """Logits over temperature, tile by tile."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[float, float | None, float]):
        self.hidden, self.weight, self.bias = hidden, weight, bias
        scale, self.cap, temperature = shape
        #: What the derivative by a bare product has as a factor.
        self.rate = scale / temperature
        self._scale, self._inverse_temperature = scale, 1.0 / temperature
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        height, width = _CPU_TILE if hidden.device.type == "cpu" else _TILE
        self.height, self.width = min(height, len(hidden)), min(width, len(weight))
        self._product = hidden.new_empty(self.height * self.width)
        self._tile = self._product if hidden.dtype == self.dtype else self._product.to(self.dtype)

    def rows(self) -> Iterator[slice]:
        return (slice(start, start + self.height) for start in range(0, len(self.hidden), self.height or 1))

    def entries(self) -> Iterator[slice]:
        return (slice(start, start + self.width) for start in range(0, len(self.weight), self.width))

    def __call__(self, rows: slice, entries: slice) -> Tensor:
        """``[rows, entries]`` of logits over temperature; the next call overwrites them."""
        hidden, weight = self.hidden[rows], self.weight[entries]
        product = _part(self._product, hidden, weight)
        direct = self._tile is self._product
        # The product may bring the factor along, except where it is rounded to a shorter type first.
        factor = self._scale * (self._inverse_temperature if self.cap is None else 1.0 / self.cap)
        now, later = (factor, 1.0) if direct else (1.0, factor)
        bias, beta = (product, 0.0) if self.bias is None else (self.bias[entries], now)
        torch.addmm(bias, hidden, weight.T, beta=beta, alpha=now, out=product)
        tile = product if direct else _part(self._tile, hidden, weight).copy_(product).mul_(later)
        return tile if self.cap is None else tile.tanh_().mul_(self.cap * self._inverse_temperature)

    def slope(self, tile: Tensor) -> Tensor | None:
        """The derivative of the cap at the values of `tile`; None without one."""
        return None if self.cap is None else 1.0 - (tile / (self.cap * self._inverse_temperature)).square_()

    def columns(self, tokens: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
        """Where ``tokens[rows]`` are in a tile of these entries, int64[rows, 1], and whether they are, bool[rows]."""
        width = min(entries.stop, len(self.weight)) - entries.start
        column = tokens - entries.start
        # No index list of hits: making one would wait for the device at every tile.
        return column.clamp(0, width - 1)[:, None], (column >= 0) & (column < width)


def _part(buffer: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        shape: tuple[float, float | None, float],
    ) -> Tensor:
        tiles = _Tiles(hidden, weight, bias, shape)
        chosen = torch.zeros(len(hidden), dtype=tiles.dtype, device=hidden.device)
        total = torch.zeros_like(chosen)
        # Not minus infinity: a tile of nothing else must not make a NaN.
        largest = torch.full_like(chosen, torch.finfo(tiles.dtype).min)
        for rows in tiles.rows():
            for entries in tiles.entries():
                tile = tiles(rows, entries)
                column, inside = tiles.columns(tokens[rows], entries)
                chosen[rows] = torch.where(inside, tile.gather(1, column)[:, 0], chosen[rows])
                larger = torch.maximum(largest[rows], tile.amax(1))
                added = _exp_(tile.sub_(larger[:, None])).sum(1)
                total[rows] = total[rows] * (largest[rows] - larger).exp() + added
                largest[rows] = larger
        normalizer = largest + total.log()
        ctx.save_for_backward(hidden, weight, bias, tokens, normalizer)
        ctx.shape = shape
        return chosen - normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, normalizer = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        tiles = _Tiles(hidden, weight, bias, ctx.shape)
        by_hidden = torch.zeros_like(hidden, dtype=tiles.dtype) if wants_hidden else None
        by_weight = torch.empty_like(weight) if wants_weight else None
        by_bias = torch.empty_like(bias) if wants_bias else None
        upstream = upstream[:, None] * tiles.rate
        # Vocabulary outside, tokens inside: the sum over tokens is then finished tile by tile, and rounded once.
        for entries in tiles.entries():
            part = weight[entries]
            weight_sum = torch.zeros_like(part, dtype=tiles.dtype) if wants_weight else None
            bias_sum = torch.zeros(len(part), dtype=tiles.dtype, device=part.device) if wants_bias else None
            for rows in tiles.rows():
                tile = tiles(rows, entries)
                slope = tiles.slope(tile)
                column, inside = tiles.columns(tokens[rows], entries)
                # The derivative of a log-softmax: one-hot minus softmax.
                _exp_(tile.sub_(normalizer[rows, None])).neg_().scatter_add_(1, column, inside[:, None].to(tile.dtype))
                tile.mul_(upstream[rows])
                if slope is not None:
                    tile.mul_(slope)
                product = tile.to(hidden.dtype)
                if by_hidden is not None:
                    _add_product(by_hidden[rows], product, part)
                if weight_sum is not None:
                    _add_product(weight_sum, product.T, hidden[rows])
                if bias_sum is not None:
                    bias_sum += tile.sum(0)
            if by_weight is not None and weight_sum is not None:
                by_weight[entries] = weight_sum
            if by_bias is not None and bias_sum is not None:
                by_bias[entries] = bias_sum
        return None if by_hidden is None else by_hidden.to(hidden.dtype), by_weight, by_bias, None, None


def _exp_(tile: Tensor) -> Tensor:
    """In place; on a CPU `exp2` takes a third of the time of `exp`."""
    return tile.mul_(math.log2(math.e)).exp2_()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in place; the sum stays in `total`'s dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
