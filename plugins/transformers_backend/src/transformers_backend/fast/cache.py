"""`FastDecoder`: decoding with quick products, and with keys and values in buffers with room for the next tokens.

transformers joins old and new into a new tensor, in every layer at every token; here a token is written into its place.
Only plain attention layers are replaced. Sliding windows, recurrent states and everything else stay those of
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from transformers_backend.decoding import Decoder
from transformers_backend.fast.onednn import quick_products

#: How many more tokens a new buffer has room for, or a quarter of those it holds if that is more.
_ROOM = 64


class FastDecoder(Decoder):
    @contextmanager
    def accelerated(self) -> Iterator[None]:
        with quick_products(self._engine.base):
            yield

    def _new_cache(self) -> Any:
        return roomy_cache(self._engine.base.config)


def roomy_cache(config: Any) -> DynamicCache:
    """Return an empty cache of the kinds that the layers of a model with this `config` need."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class RoomyLayer(DynamicLayer):
    """One layer's `keys` and `values`, ``[rows, heads, length, size]``: the first columns of two larger buffers.

    The first tokens are kept without a buffer, because they may still be expanded to more rows.
    """

    #: There is nothing else: see `CachedRows.may_join`.
    joins = True

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens, ``[rows, heads, new, size]``, and return all states so far."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        start, stop = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if self._buffers is None or stop > self._buffers[0].shape[-2]:
            self._buffers = _roomy(self.keys, stop), _roomy(self.values, stop)
        keys, values = self._buffers
        keys[..., start:stop, :] = key_states
        values[..., start:stop, :] = value_states
        self.keys, self.values = keys[..., :stop, :], values[..., :stop, :]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row ``beam_idx[i]`` was. Rows that keep their places are not copied."""
        if self.keys is None or self.values is None:
            return
        rows = len(beam_idx)
        if self._buffers is None or rows > len(self.keys):
            self._buffers = None
            beam_idx = beam_idx.to(self.keys.device)
            self.keys, self.values = self.keys[beam_idx], self.values[beam_idx]
            return
        # On the CPU, if that is where the numbers are: how many have moved is known there without waiting.
        moved = (beam_idx != torch.arange(rows, device=beam_idx.device)).nonzero()[:, 0]
        places, sources = moved.to(self.keys.device), beam_idx[moved].to(self.keys.device)
        for states in (self.keys, self.values):
            states[places] = states[sources]
        self._buffers = self._buffers[0][:rows], self._buffers[1][:rows]
        self.keys, self.values = self.keys[:rows], self.values[:rows]


def _roomy(states: Tensor, length: int) -> Tensor:
    """Return a buffer that starts with `states` and has room for `length` tokens and more."""
    *outer, old, size = states.shape
    buffer = states.new_empty(*outer, length + max(_ROOM, length // 4), size)
    buffer[..., :old, :] = states
    return buffer
