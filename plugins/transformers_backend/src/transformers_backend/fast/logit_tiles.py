"""`LogitTiles`: logits one tile at a time, and what becomes of a tile in a sum over the vocabulary.

A tile is the product of a block of hidden states and a range of the head's rows. All tiles use one buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from transformers_backend.fast import onednn
from transformers_backend.fast.reductions import TileReduction

#: Tokens × vocabulary entries of a tile. On a CPU, 4 MiB of float32 stay in its cache; elsewhere 128 MiB give a GPU
#: enough to do with each tile. With fewer tokens than that, a tile on a CPU is wider.
_CPU_TILE, _TILE = (1024, 1024), (2048, 16384)


@dataclass(frozen=True)
class HeadForm:
    """What a call makes of hidden states, weight and bias; for the attributes see `TiledHead`."""

    scale: float
    cap: float | None
    temperature: float
    dtype: torch.dtype
    natural: bool
    reduction: TileReduction | None


class LogitTiles:
    """Makes logits over temperature, tile by tile.

    Attributes:
        rate: the constant factor in the derivative of a logit over temperature by a bare product.
        dtype: of the tiles and of all sums.
        vocab_size: number of the head's rows.
        height, width: size of a tile, in tokens and vocabulary entries.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, form: HeadForm) -> None:
        self.hidden, self.weight = hidden.to(form.dtype), weight
        self.bias = None if bias is None else bias.to(form.dtype)
        self.cap, self._inverse_temperature = form.cap, 1.0 / form.temperature
        self._factor = form.scale * (self._inverse_temperature if form.cap is None else 1.0 / form.cap)
        self.rate = form.scale / form.temperature
        self._natural = form.natural
        self.dtype = torch.promote_types(form.dtype, torch.float32)
        self.vocab_size = len(weight)
        on_cpu = hidden.device.type == "cpu"
        height, width = _CPU_TILE if on_cpu else _TILE
        self.height = min(height, len(hidden))
        if on_cpu and self.height:
            width *= height // self.height
        self.width = min(width, len(weight))
        self._by_onednn = form.dtype == torch.float32 and onednn.is_quicker(weight)
        self._product = self.hidden.new_empty(0 if self._by_onednn else self.height * self.width)
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
        if self._by_onednn:
            bias = None if self.bias is None else self.bias[entries]
            return onednn.product(hidden, weight, bias), self._factor
        product = _part(self._product, hidden, weight)
        # The product can include the factor, unless it is first rounded to a shorter type.
        now, later = (self._factor, 1.0) if self._direct else (1.0, self._factor)
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


class LogSum:
    """The log of a sum of exponentials of each row, to which tiles are added one after another.

    "Online normalizer calculation for softmax", Milakov and Gimelshein 2018, algorithm 3.
    """

    def __init__(self, rows: int, tiles: LogitTiles) -> None:
        self._tiles = tiles
        self._total = torch.zeros(rows, dtype=tiles.dtype, device=tiles.hidden.device)
        # Not minus infinity, which would turn a tile of minus infinities into NaN.
        self._largest = torch.full_like(self._total, torch.finfo(tiles.dtype).min)

    def add_(self, tile: Tensor, peak: Tensor | None = None) -> None:
        """Add ``[rows, n]``, which is overwritten.

        Args:
            tile: what is added.
            peak: ``[rows]``, the largest of each row, if it is known.
        """
        larger = torch.maximum(self._largest, tile.amax(1) if peak is None else peak)
        added = self._tiles.exp_(tile.sub_(larger[:, None])).sum(1)
        self._total = added.addcmul_(self._total, self._largest.sub_(larger).exp_())
        self._largest = larger

    def log(self) -> Tensor:
        """Return the log of each sum, ``[rows]``; minus infinity where all terms are zero."""
        return self._largest + self._total.log()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Do ``total += left @ right`` in place. The sum stays in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _part(buffer: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))
