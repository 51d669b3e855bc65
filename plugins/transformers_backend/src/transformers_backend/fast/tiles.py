"""`TiledHead`: log-probabilities of chosen tokens directly from hidden states, one tile of logits at a time.

No tensor here is as wide as the vocabulary. A tile is the product of a block of hidden states and a range of the head's
rows. All tiles use one buffer: the maximum and the sum of the softmax are updated tile by tile ("Online normalizer
calculation for softmax", Milakov and Gimelshein 2018, algorithm 3), and a token's own logit is taken from the tile that
holds it. The backward pass makes the tiles again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformers_backend.fast.reductions import TileReduction, reduction_for

#: Tokens × vocabulary entries of a tile. On a CPU, 4 MiB of float32 stay in its cache; elsewhere 128 MiB give a GPU
#: enough to do with each tile.
_CPU_TILE, _TILE = (1024, 1024), (2048, 16384)


@dataclass(frozen=True, eq=False)
class TiledHead:
    """A head whose logits are ``scale · (hidden · weightᵀ + bias)``, or ``cap · tanh(logits / cap)`` of those.

    Attributes:
        weight: ``[vocab, hidden]``.
        bias: ``[vocab]``, or None.
        scale: 1.0 for most models.
        cap: None for most models.
        dtype: of the matrix product, to which hidden states, weight and bias are cast a tile at a time, as autocast
            casts them; None for that of the hidden states.
        natural: whether tiles are exponentiated with `exp` and not with `exp2`; None for what is faster on the device.
        reduction: how tiles are reduced if there is neither a bias nor a cap; None for what is used on the device.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    cap: float | None = None
    dtype: torch.dtype | None = None
    natural: bool | None = None
    reduction: TileReduction | None = None

    def logprobs(self, hidden: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """Return float32[n]: the log-softmax, at `tokens`, of the logits over `temperature`.

        Gradients flow to hidden, weight and bias, in their dtypes, but not gradients of gradients. Only the arguments
        and n numbers are kept for them. Sums are made in float32, or in float64 if `hidden` is float64.

        Args:
            hidden: ``[n, hidden]``.
            tokens: int64[n].
            temperature: what the logits are divided by.
        """
        return self._apply(hidden, tokens, temperature, False)[0]

    def logprobs_and_argmax(self, hidden: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return what `logprobs` returns, and int64[n]: the id of the largest logit, the lowest of equal ones."""
        return self._apply(hidden, tokens, temperature, True)

    def _apply(self, hidden: Tensor, tokens: Tensor, temperature: float, argmax: bool) -> tuple[Tensor, Tensor]:
        natural = hidden.device.type != "cpu" if self.natural is None else self.natural
        dtype, reduction = self.dtype or hidden.dtype, None
        if self.bias is None and self.cap is None:
            reduction = self.reduction or reduction_for(hidden.device, dtype)
        form = _Form(self.scale, self.cap, temperature, dtype, natural, reduction)
        out: tuple[Tensor, Tensor] = _ChosenLogprobs.apply(hidden, self.weight, self.bias, tokens, form, argmax)
        return out


@dataclass(frozen=True)
class _Form:
    """What a call makes of hidden states, weight and bias; for the attributes see `TiledHead`."""

    scale: float
    cap: float | None
    temperature: float
    dtype: torch.dtype
    natural: bool
    reduction: TileReduction | None


class _LogitTiles:
    """Makes logits over temperature, tile by tile.

    Attributes:
        rate: the constant factor in the derivative of a logit over temperature by a bare product.
        dtype: of the tiles and of all sums.
        height, width: size of a tile, in tokens and vocabulary entries.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, form: _Form) -> None:
        self.hidden, self.weight = hidden.to(form.dtype), weight
        self.bias = None if bias is None else bias.to(form.dtype)
        self.cap, self._scale, self._inverse_temperature = form.cap, form.scale, 1.0 / form.temperature
        self.rate = form.scale / form.temperature
        self._natural = form.natural
        self.dtype = torch.promote_types(form.dtype, torch.float32)
        height, width = _CPU_TILE if hidden.device.type == "cpu" else _TILE
        self.height, self.width = min(height, len(hidden)), min(width, len(weight))
        self._product = self.hidden.new_empty(self.height * self.width)
        self._direct = form.dtype == self.dtype
        # Made when it is needed.
        self._tile: Tensor | None = None

    def rows(self) -> Iterator[slice]:
        return (slice(start, start + self.height) for start in range(0, len(self.hidden), self.height or 1))

    def entries(self) -> Iterator[slice]:
        return (slice(start, start + self.width) for start in range(0, len(self.weight), self.width))

    def part(self, entries: slice) -> Tensor:
        """Return these rows of the weight in the dtype of the product. All of them would be a copy of the head."""
        return self.weight[entries].to(self.hidden.dtype)

    def product(self, rows: slice, entries: slice) -> tuple[Tensor, float]:
        """Return ``[rows, entries]`` in the dtype of the head, and the factor that is still missing in logits over
        temperature, or in the arguments of a cap. The next call overwrites them.
        """
        hidden, weight = self.hidden[rows], self.part(entries)
        product = _part(self._product, hidden, weight)
        # The product can include the factor, unless it is first rounded to a shorter type.
        factor = self._scale * (self._inverse_temperature if self.cap is None else 1.0 / self.cap)
        now, later = (factor, 1.0) if self._direct else (1.0, factor)
        bias, beta = (product, 0.0) if self.bias is None else (self.bias[entries], now)
        torch.addmm(bias, hidden, weight.T, beta=beta, alpha=now, out=product)
        return product, later

    def __call__(self, rows: slice, entries: slice) -> Tensor:
        """Return ``[rows, entries]`` of logits over temperature. The next call overwrites them."""
        product, later = self.product(rows, entries)
        tile = product
        if not self._direct:
            if self._tile is None:
                self._tile = torch.empty_like(self._product, dtype=self.dtype)
            tile = self._tile[: product.numel()].view(product.shape).copy_(product)
        if later != 1.0:
            # On a GPU, every pass over a tile costs a good part of its product.
            tile.mul_(later)
        return tile if self.cap is None else tile.tanh_().mul_(self.cap * self._inverse_temperature)

    def exp_(self, tile: Tensor) -> Tensor:
        """Exponentiate in place. On a CPU `exp2` takes a third of the time of `exp`; elsewhere it is one pass more."""
        return tile.exp_() if self._natural else tile.mul_(math.log2(math.e)).exp2_()

    def slope(self, tile: Tensor) -> Tensor | None:
        """Return the derivative of the cap at the values of `tile`; None if there is no cap."""
        return None if self.cap is None else 1.0 - (tile / (self.cap * self._inverse_temperature)).square_()

    def columns(self, tokens: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
        """Return the column of each token in a tile of these entries, int64[rows, 1], and whether it is in it,
        bool[rows].
        """
        width = min(entries.stop, len(self.weight)) - entries.start
        column = tokens - entries.start
        # No list of the tokens inside: making one would wait for the device at every tile.
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
        form: _Form,
        wants_argmax: bool,
    ) -> tuple[Tensor, Tensor]:
        tiles = _LogitTiles(hidden, weight, bias, form)
        chosen = torch.zeros(len(hidden), dtype=tiles.dtype, device=hidden.device)
        total = torch.zeros_like(chosen)
        # Not minus infinity, which would turn a tile of minus infinities into NaN.
        largest = torch.full_like(chosen, torch.finfo(tiles.dtype).min)
        best = torch.zeros(len(hidden) if wants_argmax else 0, dtype=torch.int64, device=hidden.device)
        reduction = None if wants_argmax else form.reduction
        for rows in tiles.rows():
            for entries in tiles.entries():
                if reduction is not None:
                    columns = tokens[rows] - entries.start
                    reduction.fold(*tiles.product(rows, entries), columns, largest[rows], total[rows], chosen[rows])
                    continue
                tile = tiles(rows, entries)
                column, inside = tiles.columns(tokens[rows], entries)
                chosen[rows] = torch.where(inside, tile.gather(1, column)[:, 0], chosen[rows])
                if wants_argmax:
                    peak, place = tile.max(1)
                    # The first of equal logits: of a tile, and of all tiles.
                    best[rows] = torch.where(peak > largest[rows], place + entries.start, best[rows])
                else:
                    peak = tile.amax(1)
                larger = torch.maximum(largest[rows], peak)
                added = tiles.exp_(tile.sub_(larger[:, None])).sum(1)
                total[rows] = total[rows] * (largest[rows] - larger).exp() + added
                largest[rows] = larger
        normalizer = largest + total.log()
        # The cast hidden states, which autocast makes shorter. The weight is in memory anyway, as it is.
        ctx.save_for_backward(tiles.hidden, weight, bias, tokens, normalizer)
        ctx.form, ctx.hidden_dtype = form, hidden.dtype
        ctx.mark_non_differentiable(best)
        return chosen - normalizer, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, normalizer = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        tiles = _LogitTiles(hidden, weight, bias, ctx.form)
        by_hidden = torch.zeros_like(hidden, dtype=tiles.dtype) if wants_hidden else None
        by_weight = torch.empty_like(weight) if wants_weight else None
        by_bias = torch.empty_like(bias) if wants_bias else None
        upstream = upstream * tiles.rate
        # Vocabulary in the outer loop: each sum over tokens is then finished before the next, and rounded once.
        for entries in tiles.entries():
            part = tiles.part(entries)
            weight_sum = torch.zeros_like(part, dtype=tiles.dtype) if wants_weight else None
            bias_sum = torch.zeros(len(part), dtype=tiles.dtype, device=part.device) if wants_bias else None
            for rows in tiles.rows():
                tile, product = _gradient(tiles, rows, entries, tokens, normalizer, upstream, ctx.form)
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
        return None if by_hidden is None else by_hidden.to(ctx.hidden_dtype), by_weight, by_bias, None, None, None


def _gradient(
    tiles: _LogitTiles,
    rows: slice,
    entries: slice,
    tokens: Tensor,
    normalizer: Tensor,
    upstream: Tensor,
    form: _Form,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the bare products of a tile: for the sum over tokens, and in the dtype of the head."""
    tokens, normalizer, upstream = tokens[rows], normalizer[rows], upstream[rows]
    if form.reduction is not None and form.reduction.makes_gradients:
        product, factor = tiles.product(rows, entries)
        form.reduction.gradient_(product, factor, tokens - entries.start, normalizer, upstream)
        return product, product
    tile = tiles(rows, entries)
    slope = tiles.slope(tile)
    column, inside = tiles.columns(tokens, entries)
    # The derivative of a log-softmax: one-hot minus softmax.
    tiles.exp_(tile.sub_(normalizer[:, None])).mul_(-upstream[:, None])
    tile.scatter_add_(1, column, (inside * upstream)[:, None])
    if slope is not None:
        tile.mul_(slope)
    return tile, tile.to(form.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Do ``total += left @ right`` in place. The sum stays in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
