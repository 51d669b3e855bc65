"""`TopLogprobs`: log-probs of several ids at each position, and of all others together, from tiles of logits.

Let z be the logits over temperature, N the log of the sum of their exponentials, and R that of the ids that are not
wanted. The log-probs are ``z_i - N`` and the tail is ``R - N``. Let g, g_i and g_R be the upstream gradients of the
token, of the wanted ids and of the tail, and G their sum. The derivative by z_v is ``g_v - G · exp(z_v - N)`` for a
wanted id and ``g_R · exp(z_v - R) - G · exp(z_v - N)`` for another one; the token's own g is added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformers_backend.fast.logit_tiles import HeadForm, LogitTiles, LogSum, add_product
from transformers_backend.fast.top_logits import GivenLogits, LargestLogit, LargestLogits, WantedLogits, rows_of


class TopLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        wanted: Tensor | int,
        form: HeadForm,
        wants_argmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the log-probs of `tokens`, ``[n]``; the ids, int64[n, k], and their log-probs; the tail, ``[n]``; and
        the most probable ids, int64[n], or int64[0].

        Args:
            wanted: int64[n, k], the ids; or how many of the most probable ones.
        """
        tiles = LogitTiles(hidden, weight, bias, form)
        n, device = len(hidden), hidden.device
        k = wanted if isinstance(wanted, int) else wanted.shape[1]
        chosen = torch.zeros(n, dtype=tiles.dtype, device=device)
        values, ids = chosen.new_empty(n, k), torch.empty(n, k, dtype=torch.int64, device=device)
        rest = torch.empty_like(chosen)
        best = torch.zeros(n if wants_argmax else 0, dtype=torch.int64, device=device)
        for rows in tiles.rows():
            count = len(chosen[rows])
            collector: WantedLogits
            if isinstance(wanted, int):
                collector = LargestLogits(wanted, count, tiles)
            else:
                collector = GivenLogits(wanted[rows], tiles)
            own, others = GivenLogits(tokens[rows, None], tiles), LogSum(count, tiles)
            largest = LargestLogit(count, tiles) if wants_argmax else None
            for entries in tiles.entries():
                tile = tiles(rows, entries)
                own.read(tile, entries)
                if largest is not None:
                    largest.read(tile, entries, tile.amax(1))
                collector.take_(tile, entries, others)
                others.add_(tile)
            ids[rows], values[rows] = collector.finish(others)
            chosen[rows], rest[rows] = own.values[:, 0], others.log()
            if largest is not None:
                best[rows] = largest.ids
        normalizer = torch.logaddexp(rest, values.logsumexp(1))
        logprobs, tail = values - normalizer[:, None], rest - normalizer
        ctx.save_for_backward(tiles.hidden, weight, bias, tokens, ids, logprobs, rest, normalizer)
        ctx.form, ctx.hidden_dtype = form, hidden.dtype
        ctx.mark_non_differentiable(ids, best)
        return chosen - normalizer, ids, logprobs, tail, best

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_chosen: Tensor, _: Tensor, by_logprobs: Tensor, by_tail: Tensor, __: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, ids, logprobs, rest, normalizer = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        tiles = LogitTiles(hidden, weight, bias, ctx.form)
        by_hidden = torch.zeros_like(hidden, dtype=tiles.dtype) if wants_hidden else None
        by_weight = torch.empty_like(weight) if wants_weight else None
        by_bias = torch.empty_like(bias) if wants_bias else None
        # Where there is no tail, or an id without a probability, nothing changes it.
        none = rest == -torch.inf
        by_tail = by_tail.masked_fill(none, 0.0)
        by_logprobs = by_logprobs.masked_fill(logprobs == -torch.inf, 0.0)
        total = by_chosen + by_logprobs.sum(1) + by_tail
        # Both exponentials of an id that is not wanted are multiples of exp(z - rest), which is at most 1.
        rest = torch.where(none, normalizer, rest)
        factor = (by_tail - total * (rest - normalizer).exp()) * tiles.rate
        by_wanted = (by_logprobs - total[:, None] * logprobs.exp()) * tiles.rate
        by_chosen = by_chosen * tiles.rate
        blocks = list(rows_of(tiles, ids))
        # Vocabulary in the outer loop: each sum over tokens is then finished before the next, and rounded once.
        for entries in tiles.entries():
            part = tiles.part(entries)
            weight_sum = torch.zeros_like(part, dtype=tiles.dtype) if wants_weight else None
            bias_sum = torch.zeros(len(part), dtype=tiles.dtype, device=part.device) if wants_bias else None
            for rows, given in blocks:
                tile = tiles(rows, entries)
                slope = tiles.slope(tile)
                tiles.exp_(tile.sub_(rest[rows][:, None])).mul_(factor[rows][:, None])
                # This also overwrites what has overflowed: a wanted id may be far more probable than the rest.
                places, columns, flat = given.places(entries)
                tile[places, columns] = by_wanted[rows].flatten()[flat]
                column, inside = tiles.columns(tokens[rows], entries)
                tile.scatter_add_(1, column, (inside * by_chosen[rows])[:, None])
                if slope is not None:
                    tile.mul_(slope)
                product = tile.to(ctx.form.dtype)
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
        by_hidden = None if by_hidden is None else by_hidden.to(ctx.hidden_dtype)
        return by_hidden, by_weight, by_bias, None, None, None, None
