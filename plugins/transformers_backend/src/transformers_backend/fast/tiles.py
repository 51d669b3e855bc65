"""`TiledHead`: log-probabilities of chosen tokens directly from hidden states, one tile of logits at a time.

No tensor here is as wide as the vocabulary. A tile is the product of a block of hidden states and a range of the head's
rows. All tiles use one buffer: the maximum and the sum of the softmax are updated tile by tile ("Online normalizer
calculation for softmax", Milakov and Gimelshein 2018, algorithm 3), and a token's own logit is taken from the tile that
holds it. The backward pass makes the tiles again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corelm.spec import Ragged, TopIds
from corelm_engine_kit.token_scores import logprobs_in_sets
from transformers_backend.fast.logit_tiles import HeadForm, LogitTiles, LogSum, add_product
from transformers_backend.fast.reductions import TileReduction, reduction_for
from transformers_backend.fast.set_logits import SetLogits
from transformers_backend.fast.top_logits import GivenLogits, LargestLogit
from transformers_backend.fast.top_logprobs import TopLogprobs


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

    def logprobs_in_sets(self, hidden: Tensor, tokens: Tensor, sets: Ragged, temperature: float = 1.0) -> Tensor:
        """Return float32[n]: the log-softmax, at `tokens`, of the logits of the ids in each token's set.

        No other row of the head is read. Gradients are those of `logprobs`.

        Args:
            hidden, tokens, temperature: as in `logprobs`.
            sets: n rows of ids, none of them empty.
        """
        form = self._form(hidden, temperature)
        logits = form.scale * SetLogits.apply(hidden, self.weight, self.bias, sets, form)
        logits = logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)
        return logprobs_in_sets(logits / temperature, sets, tokens)

    def logprobs_and_top(
        self, hidden: Tensor, tokens: Tensor, wanted: Tensor | int, temperature: float = 1.0, *, argmax: bool = False
    ) -> tuple[Tensor, TopIds, Tensor | None]:
        """Return what `logprobs` returns, the log-probs of several ids at each position and of all others together, and
        int64[n], the id of the largest logit, if `argmax` asks for it.

        Args:
            hidden, tokens, temperature: as in `logprobs`.
            wanted: int64[n, k], the ids, -1 for none; or how many of the most probable ones.
            argmax: whether to return that id.
        """
        form = self._form(hidden, temperature)
        logprobs, ids, values, tail, best = TopLogprobs.apply(
            hidden, self.weight, self.bias, tokens, wanted, form, argmax
        )
        return logprobs, TopIds(ids, values, tail), best if argmax else None

    def _apply(self, hidden: Tensor, tokens: Tensor, temperature: float, argmax: bool) -> tuple[Tensor, Tensor]:
        form = self._form(hidden, temperature)
        out: tuple[Tensor, Tensor] = _ChosenLogprobs.apply(hidden, self.weight, self.bias, tokens, form, argmax)
        return out

    def _form(self, hidden: Tensor, temperature: float) -> HeadForm:
        natural = hidden.device.type != "cpu" if self.natural is None else self.natural
        dtype, reduction = self.dtype or hidden.dtype, None
        if self.bias is None and self.cap is None:
            reduction = self.reduction or reduction_for(hidden.device, dtype)
        return HeadForm(self.scale, self.cap, temperature, dtype, natural, reduction)


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        form: HeadForm,
        wants_argmax: bool,
    ) -> tuple[Tensor, Tensor]:
        tiles = LogitTiles(hidden, weight, bias, form)
        chosen = torch.zeros(len(hidden), dtype=tiles.dtype, device=hidden.device)
        normalizer = torch.empty_like(chosen)
        best = torch.zeros(len(hidden) if wants_argmax else 0, dtype=torch.int64, device=hidden.device)
        for rows in tiles.rows():
            if form.reduction is not None and not wants_argmax:
                normalizer[rows] = _fold(form.reduction, tiles, rows, tokens[rows], chosen[rows])
                continue
            count = len(chosen[rows])
            own, total, largest = GivenLogits(tokens[rows, None], tiles), LogSum(count, tiles), None
            if wants_argmax:
                largest = LargestLogit(count, tiles)
            for entries in tiles.entries():
                tile = tiles(rows, entries)
                own.read(tile, entries)
                peak = tile.amax(1)
                if largest is not None:
                    largest.read(tile, entries, peak)
                total.add_(tile, peak)
            chosen[rows], normalizer[rows] = own.values[:, 0], total.log()
            if largest is not None:
                best[rows] = largest.ids
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
        tiles = LogitTiles(hidden, weight, bias, ctx.form)
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
                    add_product(by_hidden[rows], product, part)
                if weight_sum is not None:
                    add_product(weight_sum, product.T, hidden[rows])
                if bias_sum is not None:
                    bias_sum += tile.sum(0)
            if by_weight is not None and weight_sum is not None:
                by_weight[entries] = weight_sum
            if by_bias is not None and bias_sum is not None:
                by_bias[entries] = bias_sum
        return None if by_hidden is None else by_hidden.to(ctx.hidden_dtype), by_weight, by_bias, None, None, None


def _fold(reduction: TileReduction, tiles: LogitTiles, rows: slice, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Return the log of the sum of the exponentials of these rows' logits, and write the tokens' logits to `chosen`."""
    total = torch.zeros_like(chosen)
    # Not minus infinity, which would turn a tile of minus infinities into NaN.
    largest = torch.full_like(chosen, torch.finfo(tiles.dtype).min)
    for entries in tiles.entries():
        reduction.fold(*tiles.product(rows, entries), tokens - entries.start, largest, total, chosen)
    return largest + total.log()


def _gradient(
    tiles: LogitTiles,
    rows: slice,
    entries: slice,
    tokens: Tensor,
    normalizer: Tensor,
    upstream: Tensor,
    form: HeadForm,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the bare products of a tile: for the sum over tokens, and in the dtype of the head."""
    tokens, normalizer, upstream = tokens[rows], normalizer[rows], upstream[rows]
    if form.reduction is not None:
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
