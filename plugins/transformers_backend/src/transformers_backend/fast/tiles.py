"""`TiledHead`: log-probabilities directly from hidden states, one tile of logits at a time.

No tensor here is as wide as the vocabulary. A tile is the product of a block of hidden states and a range of
the head's rows. All tiles use one buffer: the maximum and the sum of the softmax are updated tile by tile
("Online normalizer calculation for softmax", Milakov and Gimelshein 2018, algorithm 3), and the logits of
given ids are taken from the tiles that hold them. The backward pass makes the tiles again.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corelm.spec import Ragged, TopIds
from corelm_engine_kit.token_scores import TokenQuery, TokenScores, logprobs_by_sets, logprobs_in_sets
from transformers_backend.fast import onednn
from transformers_backend.fast.set_logits import SetLogits

_log = logging.getLogger(__name__)

#: Tokens × vocabulary entries of a tile. On a CPU, 4 MiB of float32 stay in its cache; elsewhere 128 MiB give a GPU
#: enough to do with each tile. With fewer tokens than that, a tile on a CPU is wider.
_CPU_TILE, _TILE = (1024, 1024), (2048, 16384)
#: The same of a tile whose largest logits are collected: finding them costs less in few long rows.
_CPU_RANKED_TILE = (256, 4096)
#: How often the largest logits of a tile, those kept before included, wait until they are ranked.
_WAITING = 4
#: Set to 0 to leave out the kernels of `triton_head`.
VARIABLE = "CORELM_TRITON_HEAD"
#: How far kernels may be from the plain passes, as a share of the largest log-prob, and of the largest gradient.
_NEAR, _NEAR_GRADIENT = 1e-5, 0.02


@dataclass(frozen=True, eq=False)
class TiledHead:
    """A head whose logits are ``scale · (hidden · weightᵀ + bias)``, or ``cap · tanh(logits / cap)`` of those.

    Gradients of log-probs flow to hidden, weight and bias, in their dtypes, but not gradients of
    gradients. Sums are made in float32, or in float64 if `hidden` is float64. `hidden` is ``[n, hidden]``,
    `tokens` int64[n], and `temperature` is what the logits are divided by.

    Attributes:
        weight: ``[vocab, hidden]``.
        bias: ``[vocab]``, or None.
        scale: 1.0 for most models.
        cap: None for most models.
        dtype: of the matrix product, to which hidden states, weight and bias are cast a tile at a time, as autocast
            casts them; None for that of the hidden states.
        kernels: `triton_head.ByTriton` or the like, for a head with neither a bias nor a cap; False for none, and None
            for those of `kernels_for`.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    cap: float | None = None
    dtype: torch.dtype | None = None
    kernels: Any = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32[n, vocab]: what the other methods are made of, for a few states and without gradients."""
        tiles = LogitTiles(hidden, self.weight, self.bias, self, 1.0)
        rows = [torch.cat([tiles(some, each).clone() for each in tiles.entries()], 1) for some in tiles.rows()]
        return torch.cat(rows)

    def logprobs(self, hidden: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """Return float32[n]: the log-softmax, at `tokens`, of the logits."""
        return self.logprobs_and_top(hidden, tokens, 0, temperature)[0]

    def logprobs_and_top(
        self, hidden: Tensor, tokens: Tensor, wanted: Tensor | int, temperature: float = 1.0, *, argmax: bool = False
    ) -> tuple[Tensor, TopIds, Tensor | None]:
        """Return what `logprobs` returns, the log-probs of several ids at each position and of all others together, and
        int64[n], the id of the largest logit, the lowest of equal ones, if `argmax` asks for it.

        `wanted` is int64[n, k], the ids, -1 for none; or how many of the most probable ones.
        """
        logprobs, ids, values, tail, best = _Logprobs.apply(
            hidden, self.weight, self.bias, tokens, wanted, self, temperature, argmax
        )
        return logprobs, TopIds(ids, values, tail), best if argmax else None

    def logprobs_in_sets(self, hidden: Tensor, tokens: Tensor, sets: Ragged, temperature: float = 1.0) -> Tensor:
        """Return float32[n]: the log-softmax, at `tokens`, of the logits of the ids in each token's set.

        `sets` has n rows of ids, none of them empty. Only the head's rows of these ids are read.
        """
        logits = self.scale * SetLogits.apply(hidden, self.weight, self.bias, sets, self.dtype or hidden.dtype)
        logits = logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
        return logprobs_in_sets(logits / temperature, sets, tokens)

    def scores(self, states: Tensor, query: TokenQuery) -> TokenScores:
        """Answer `query`, on the device of the states, from ``[n, hidden]``. It asks for no logits."""
        temperature = query.temperature
        if query.wants_top or query.sets is None or not bool(query.sets.lengths.any()):
            wanted = query.top_k if query.top_ids is None else query.top_ids
            found, top, best = self.logprobs_and_top(states, query.targets, wanted, temperature, argmax=query.argmax)
            several = TopIds(top.ids, top.logprobs.float(), top.tail.float()) if query.wants_top else None
            return TokenScores(found.float(), (), best, several)

        def whole(places: Tensor | None, some: TokenQuery) -> Tensor:
            return self.logprobs(states if places is None else states[places], some.targets, temperature).float()

        def within(places: Tensor, some: TokenQuery) -> Tensor:
            assert some.sets is not None
            return self.logprobs_in_sets(states[places], some.targets, some.sets, temperature).float()

        found, best = logprobs_by_sets(query, whole, within), None
        if query.argmax:
            # Of the whole vocabulary, whatever the sets are.
            with torch.no_grad():
                best = self.logprobs_and_top(states, query.targets, 0, temperature, argmax=True)[2]
        return TokenScores(found, (), best)


class LogitTiles:
    """Makes logits over temperature, tile by tile.

    Attributes:
        rate: the constant factor in the derivative of a logit over temperature by a bare product.
        dtype: of all sums.
        vocab_size: number of the head's rows.
        height, width: size of a tile, in tokens and vocabulary entries.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: TiledHead,
        temperature: float,
        *,
        ranks: bool = False,
    ) -> None:
        product = head.dtype or hidden.dtype
        self.hidden, self.weight = hidden.to(product), weight
        self.bias = None if bias is None else bias.to(product)
        self.cap, self._inverse_temperature = head.cap, 1.0 / temperature
        self._factor = head.scale * (self._inverse_temperature if head.cap is None else 1.0 / head.cap)
        self.rate = head.scale / temperature
        self.dtype = torch.promote_types(product, torch.float32)
        self.vocab_size = len(weight)
        self.on_cpu = hidden.device.type == "cpu"
        height, width = (_CPU_RANKED_TILE if ranks else _CPU_TILE) if self.on_cpu else _TILE
        self.height = min(height, len(hidden))
        if self.on_cpu and self.height:
            width *= height // self.height
        self.width = min(width, len(weight))
        self._by_onednn = product == torch.float32 and onednn.is_quicker(weight)
        self._product = self.hidden.new_empty(0 if self._by_onednn else self.height * self.width)
        self._direct = product == self.dtype
        self.kernels = None
        if bias is None and head.cap is None and head.kernels is not False:
            self.kernels = head.kernels or kernels_for(hidden.device, product)
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
        bias = None if self.bias is None else self.bias[entries]
        if self._by_onednn:
            return onednn.product(hidden, weight, bias), self._factor
        product = self._product[: len(hidden) * len(weight)].view(len(hidden), len(weight))
        # The product can include the factor, unless it is first rounded to a shorter type.
        now, later = (self._factor, 1.0) if self._direct else (1.0, self._factor)
        beta = 0.0 if bias is None else now
        torch.addmm(product if bias is None else bias, hidden, weight.T, beta=beta, alpha=now, out=product)
        return product, later

    def __call__(self, rows: slice, entries: slice) -> Tensor:
        """Return ``[rows, entries]`` of logits over temperature in `dtype`. The next call overwrites them."""
        tile, later = self.product(rows, entries)
        if not self._direct:
            if self._tile is None:
                self._tile = torch.empty_like(self._product, dtype=self.dtype)
            tile = self._tile[: tile.numel()].view(tile.shape).copy_(tile)
        if later != 1.0:
            # On a GPU, every pass over a tile costs a good part of its product.
            tile.mul_(later)
        return tile if self.cap is None else tile.tanh_().mul_(self.cap * self._inverse_temperature)

    def exp_(self, tile: Tensor) -> Tensor:
        """Exponentiate in place. On a CPU `exp2` takes a third of the time of `exp`; elsewhere it is one pass more."""
        return tile.mul_(math.log2(math.e)).exp2_() if self.on_cpu else tile.exp_()

    def slope(self, tile: Tensor) -> Tensor | None:
        """Return the derivative of the cap at the values of `tile`; None if there is no cap."""
        return None if self.cap is None else 1.0 - (tile / (self.cap * self._inverse_temperature)).square_()


class _LogSum:
    """The log of a sum of exponentials of each row, ``largest + log(total)``, to which tiles are added."""

    def __init__(self, rows: int, tiles: LogitTiles) -> None:
        self._tiles = tiles
        self.total = torch.zeros(rows, dtype=tiles.dtype, device=tiles.hidden.device)
        # Not minus infinity, which would turn a tile of minus infinities into NaN.
        self.largest = torch.full_like(self.total, torch.finfo(tiles.dtype).min)

    def add_(self, tile: Tensor, peak: Tensor | None = None) -> None:
        """Add ``[rows, n]``, which is overwritten. `peak`, ``[rows]``, is the largest of each row, if it is known."""
        larger = torch.maximum(self.largest, tile.amax(1) if peak is None else peak)
        added = self._tiles.exp_(tile.sub_(larger[:, None])).sum(1)
        self.total = added.addcmul_(self.total, self.largest.sub_(larger).exp_())
        self.largest = larger

    def log(self) -> Tensor:
        """Return the log of each sum, ``[rows]``; minus infinity where all terms are zero."""
        return self.largest + self.total.log()


class _Logprobs(torch.autograd.Function):
    """Log-probs of tokens, of several ids at each position, and of all others together, which is called the tail.

    Wanted ids are taken out of the tiles before these are summed, so the probability of the others is a sum of its own.
    It keeps its digits however small it is: one minus the sum of the wanted probabilities would not.

    Let z be the logits over temperature, N the log of the sum of their exponentials, and R that of the ids that are not
    wanted. The log-probs are ``z_i - N`` and the tail is ``R - N``. Let g, g_i and g_R be the upstream gradients of the
    token, of the wanted ids and of the tail, and G their sum. The derivative by z_v is ``g_v - G · exp(z_v - N)`` for a
    wanted id and ``g_R · exp(z_v - R) - G · exp(z_v - N)`` for another one; the token's own g is added.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        wanted: Tensor | int,
        head: TiledHead,
        temperature: float,
        wants_argmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the log-probs of `tokens`, ``[n]``; the ids, int64[n, k], and their log-probs; the tail, ``[n]``; and
        the most probable ids, int64[n], or int64[0].
        """
        k, ranks = (wanted, wanted > 0) if isinstance(wanted, int) else (wanted.shape[1], False)
        tiles = LogitTiles(hidden, weight, bias, head, temperature, ranks=ranks)
        n, device = len(hidden), hidden.device
        chosen = torch.zeros(n, dtype=tiles.dtype, device=device)
        values, ids = chosen.new_empty(n, k), torch.empty(n, k, dtype=torch.int64, device=device)
        rest = torch.empty_like(chosen)
        best = torch.zeros(n if wants_argmax else 0, dtype=torch.int64, device=device)
        for rows in tiles.rows():
            count = len(chosen[rows])
            others = _LogSum(count, tiles)
            if tiles.kernels and not k and not wants_argmax:
                for entries in tiles.entries():
                    tile, missing = tiles.product(rows, entries)
                    column = tokens[rows] - entries.start
                    tiles.kernels.fold(tile, missing, column, others.largest, others.total, chosen[rows])
                rest[rows] = others.log()
                continue
            own = _GivenLogits(tokens[rows, None], tiles)
            largest = _LargestLogit(count, tiles) if wants_argmax else None
            given = _GivenLogits(wanted[rows], tiles) if isinstance(wanted, Tensor) else None
            several = given or (_LargestLogits(k, count, tiles) if k else None)
            for entries in tiles.entries():
                tile = tiles(rows, entries)
                own.read(tile, entries)
                peak = None if largest is None else largest.read(tile, entries)
                if several is not None:
                    several.take_(tile, entries, others)
                    peak = None
                others.add_(tile, peak)
            chosen[rows] = own.values[:, 0]
            if several is not None:
                ids[rows], values[rows] = several.finish(others)
            rest[rows] = others.log()
            if largest is not None:
                best[rows] = largest.ids
        normalizer = torch.logaddexp(rest, values.logsumexp(1)) if k else rest
        logprobs, tail = values - normalizer[:, None], rest - normalizer
        # The cast hidden states, which autocast makes shorter. The weight is in memory anyway, as it is.
        ctx.save_for_backward(tiles.hidden, weight, bias, tokens, ids, logprobs, rest, normalizer)
        ctx.head, ctx.temperature, ctx.hidden_dtype = head, temperature, hidden.dtype
        ctx.mark_non_differentiable(ids, best)
        return chosen - normalizer, ids, logprobs, tail, best

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_chosen: Tensor, _: Tensor, by_logprobs: Tensor, by_tail: Tensor, __: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, ids, logprobs, rest, normalizer = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        tiles = LogitTiles(hidden, weight, bias, ctx.head, ctx.temperature)
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
        blocks = [(rows, _GivenLogits(ids[rows], tiles) if ids.shape[1] else None) for rows in tiles.rows()]
        # Vocabulary in the outer loop: each sum over tokens is then finished before the next, and rounded once.
        for entries in tiles.entries():
            part = tiles.part(entries)
            weight_sum = torch.zeros_like(part, dtype=tiles.dtype) if wants_weight else None
            bias_sum = torch.zeros(len(part), dtype=tiles.dtype, device=part.device) if wants_bias else None
            for rows, given in blocks:
                if tiles.kernels and given is None:
                    tile, missing = tiles.product(rows, entries)
                    column = tokens[rows] - entries.start
                    tiles.kernels.gradient_(tile, missing, column, normalizer[rows], by_chosen[rows])
                else:
                    tile = tiles(rows, entries)
                    slope = tiles.slope(tile)
                    tiles.exp_(tile.sub_(rest[rows][:, None])).mul_(factor[rows][:, None])
                    if given is not None:
                        # This also overwrites what has overflowed: a wanted id may be far more probable than the rest.
                        places, columns, flat = given.places(entries)
                        tile[places, columns] = by_wanted[rows].flatten()[flat]
                    # No list of the tokens in this tile: making one would wait for the device.
                    column = tokens[rows] - entries.start
                    inside = (column >= 0) & (column < tile.shape[1])
                    column = column.clamp(0, tile.shape[1] - 1)[:, None]
                    tile.scatter_add_(1, column, (inside * by_chosen[rows])[:, None])
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
        by_hidden = None if by_hidden is None else by_hidden.to(ctx.hidden_dtype)
        return by_hidden, by_weight, by_bias, None, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Do ``total += left @ right`` in place. The sum stays in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


# Logits that are wanted by themselves -------------------------------------------------------------------------------


class _LargestLogit:
    """Finds the id of the largest logit of each row, the lowest of equal ones: `ids`, int64[rows]."""

    def __init__(self, rows: int, tiles: LogitTiles) -> None:
        device = tiles.hidden.device
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._peak = torch.full((rows,), -torch.inf, dtype=tiles.dtype, device=device)

    def read(self, tile: Tensor, entries: slice) -> Tensor:
        """Look into ``tile[rows, entries]``, and return the largest logit of each row, ``[rows]``."""
        peak = tile.amax(1)
        larger = peak > self._peak
        if tile.device.type == "cpu":
            # Searching a tile takes many times as long as its maximum, and in few rows a later tile has a larger one.
            rows = larger.nonzero()[:, 0]
            if len(rows):
                self.ids[rows] = tile[rows].argmax(1) + entries.start
        else:
            self.ids = torch.where(larger, tile.argmax(1) + entries.start, self.ids)
        self._peak = torch.maximum(self._peak, peak)
        return peak


class _GivenLogits:
    """Collects the logits of given ids, int64[rows, k], -1 for no id.

    Attributes:
        values: ``[rows, k]``, the logits of the ids in the tiles so far, minus infinity for no id.
    """

    def __init__(self, ids: Tensor, tiles: LogitTiles) -> None:
        self._ids = ids
        # The order of the ids is that of the tiles, so those of a tile lie next to each other.
        found, order = torch.where(ids < 0, tiles.vocab_size, ids).flatten().sort()
        starts = [*(entries.start for entries in tiles.entries()), tiles.vocab_size]
        # The device is waited for here, and not at every tile.
        bounds = torch.searchsorted(found, torch.tensor(starts, device=ids.device)).tolist()
        self._bounds = dict(zip(starts, pairwise(bounds), strict=False))
        self._sorted, self._order = found, order
        self.values = torch.full(ids.shape, -torch.inf, dtype=tiles.dtype, device=ids.device)

    def places(self, entries: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return where ids are in a tile of these entries, int64[m]: their rows, their columns, and their places in
        the flat table of ids.
        """
        first, last = self._bounds[entries.start]
        places = self._order[first:last]
        return places // self._ids.shape[1], self._sorted[first:last] - entries.start, places

    def read(self, tile: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
        """Collect from ``tile[rows, entries]``. Return the rows and columns of what was collected, int64[m] each."""
        rows, columns, places = self.places(entries)
        if len(places):
            self.values.view(-1)[places] = tile[rows, columns]
        return rows, columns

    def take_(self, tile: Tensor, entries: slice, others: _LogSum) -> None:
        tile[self.read(tile, entries)] = -torch.inf

    def finish(self, others: _LogSum) -> tuple[Tensor, Tensor]:
        return self._ids, self.values


class _LargestLogits:
    """Collects the k largest logits of each row: those of each tile, which wait for a few more to be ranked."""

    def __init__(self, k: int, rows: int, tiles: LogitTiles) -> None:
        values = torch.full((rows, k), -torch.inf, dtype=tiles.dtype, device=tiles.hidden.device)
        self._k, self._waiting = k, [(values, torch.full_like(values, -1, dtype=torch.int64))]

    def take_(self, tile: Tensor, entries: slice, others: _LogSum) -> None:
        """Collect from ``tile[rows, entries]``, and put minus infinity in the places of what was collected.

        Args:
            others: what was collected and is not wanted after all is added to it.
        """
        values, columns = tile.topk(min(self._k, tile.shape[1]), 1, sorted=False)
        tile.scatter_(1, columns, -torch.inf)
        self._waiting.append((values, columns + entries.start))
        if len(self._waiting) > _WAITING:
            self._rank(others)

    def finish(self, others: _LogSum) -> tuple[Tensor, Tensor]:
        """Return the ids, int64[rows, k], -1 where fewer have a probability, and their logits, the largest first."""
        values, ids = self._rank(others)
        values, order = values.sort(1, descending=True)
        return ids.gather(1, order).masked_fill_(values == -torch.inf, -1), values

    def _rank(self, others: _LogSum) -> tuple[Tensor, Tensor]:
        """Keep the largest of all that wait, and add the rest to the others."""
        values, ids = (torch.cat(each, 1) for each in zip(*self._waiting, strict=True))
        largest, columns = values.topk(self._k, 1, sorted=False)
        others.add_(values.scatter_(1, columns, -torch.inf))
        self._waiting = [(largest, ids.gather(1, columns))]
        return self._waiting[0]


# Kernels ------------------------------------------------------------------------------------------------------------


@cache
def kernels_for(device: torch.device, dtype: torch.dtype) -> Any:
    """Return the kernels that reduce products of this dtype on a device; None for the plain passes.

    On a GPU every plain pass over a tile costs a good part of its matrix product. Kernels are used where
    Triton is installed and they agree with the plain passes.
    """
    # Nobody has run the kernels on an AMD GPU.
    if device.type != "cuda" or os.environ.get(VARIABLE) == "0" or dtype == torch.float64 or torch.version.hip:
        return None
    try:
        from transformers_backend.fast.triton_head import ByTriton
    except ImportError as error:
        _log.info("the head's kernels are not used, because Triton cannot be imported: %s", error)
        return None
    return ByTriton() if agree(ByTriton(), device, dtype) else None


def agree(kernels: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a head with these kernels gives the log-probs and gradients of the plain passes, in two tiles."""
    vocab_size, found = _TILE[1] + 37, []
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 16), (vocab_size, 16)
    given = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    tokens = torch.tensor([0, _TILE[1] - 1, _TILE[1], vocab_size - 1, 1500], device=device)
    upstream = torch.tensor([1.0, -2.0, 0.5, 1.0, 0.0], device=device)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for each in (False, kernels):
            leaves = [leaf.clone().requires_grad_() for leaf in given]
            try:
                out = TiledHead(leaves[1], None, 0.7, kernels=each).logprobs(leaves[0], tokens)
                found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:
                # A compiler may fail in any way.
                _log.warning("the head's kernels are not used: %s: %s", type(error).__name__, error)
                return False
    shares = [float((one - other).abs().max() / one.abs().max()) for one, other in zip(*found, strict=True)]
    if right := shares[0] <= _NEAR and max(shares) <= _NEAR_GRADIENT:
        return right
    _log.warning("the head's kernels are not used: they are off by %s", shares)
    return False
