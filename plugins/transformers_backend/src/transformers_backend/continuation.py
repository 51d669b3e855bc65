"""`CachedRows` and `UncachedRows`: rows that grow by one token at a time, and the logits that follow each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from corelm.spec import Ragged
from corelm_engine_kit.answers import without
from transformers_backend.engine import CausalLM

#: The number of columns of a buffer is a multiple of this. Attention over columns that are not written yet costs less
#: than copying all others at every token.
_BLOCK = 64


class GrowingRows(ABC):
    """Rows of ids inside the model, of one call or of several.

    Attributes:
        logits: float32[rows, vocab], the logits that follow the last token of each row.
        columns: the length of the longest row, padding included.
        shares: which rows are whose.
    """

    logits: Tensor
    columns: int

    def __init__(self) -> None:
        self.shares: list[Share] = []

    def __len__(self) -> int:
        return sum(len(share.rows) for share in self.shares)

    def expand(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was, int64[n] on the CPU; a row may be taken several times."""
        self.keep(rows)
        self.logits = self.logits[rows.to(self.logits.device)]

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64[n] on the CPU. `logits` are out of date until the next `append`."""

    @abstractmethod
    def append(self, tokens: Tensor) -> None:
        """Append one token to each row, int64[rows]."""

    def step(self) -> None:
        """Append the token of each share to its rows. Rows that no share has any more leave before."""
        rows, shares = len(self.logits), self.shares
        left = [row for share in shares for row in share.rows]
        if len(left) < rows:
            order = without(set(range(rows)).difference(left), rows)
            self.keep(order)
            places = {row: place for place, row in enumerate(order.tolist())}
            for share in shares:
                share.rows = [places[row] for row in share.rows]
            left = [places[row] for row in left]
        tokens = shares[0].tokens if len(shares) == 1 else torch.cat([share.tokens for share in shares])
        if left != list(range(len(left))):
            tokens = tokens[torch.tensor(left).argsort().to(tokens.device)]
        self.append(tokens)


class Share:
    """Rows of one call among those that grow together.

    Attributes:
        growing: all of them.
        rows: which are its own.
        tokens: int64[rows], what is appended to them in the next step.
        most: how many tokens may be decoded at a time.
        alone: whether no rows of other calls may join.
    """

    tokens: Tensor

    def __init__(self, growing: GrowingRows, most: int, *, alone: bool = False) -> None:
        self.growing, self.most, self.alone = growing, most, alone
        self.rows = list(range(len(growing.logits)))
        growing.shares.append(self)

    @property
    def logits(self) -> Tensor:
        """float32[rows, vocab]"""
        logits, first, count = self.growing.logits, self.rows[0], len(self.rows)
        if self.rows == list(range(first, first + count)):
            return logits if count == len(logits) else logits[first : first + count]
        return logits[torch.tensor(self.rows).to(logits.device)]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64[n] on the CPU."""
        self.rows = [self.rows[row] for row in rows.tolist()]

    def leave(self) -> None:
        self.growing.shares.remove(self)


class CachedRows(GrowingRows):
    """Rows whose past is in a cache. Shorter prompts are padded on the left.

    A cache that holds keys and values of every token and nothing else is copied into buffers with room for more. A step
    writes one column of them, so all that the model is given keeps its address and its shape, until rows join or leave
    or the buffers are full. Other caches grow as transformers makes them.
    """

    def __init__(self, engine: CausalLM, prompts: Ragged, *, fixed: bool = True) -> None:
        super().__init__()
        self._engine, self._fixed = engine, fixed and engine.fixes_shapes
        self.cache = _new_cache(engine)
        inputs: dict[str, Any] = engine.inputs(prompts, "left")
        self._mask: Tensor | None = inputs["attention_mask"]
        self._ids, self._position = (inputs[name][:, -1:].clone() for name in ("input_ids", "position_ids"))
        self.columns = inputs["input_ids"].shape[1]
        # How many columns the buffers have; 0 if there are none.
        self._room = 0
        self.logits = engine.next_logits(self.cache, **inputs)

    def keep(self, rows: Tensor) -> None:
        if self._room:
            self._move(rows)
        else:
            self.cache.reorder_cache(rows)
        there = rows.to(self._position.device)
        self._ids, self._position = self._ids[there], self._position[there]
        self._mask = None if self._mask is None else self._mask[there]
        if not self._room and self._mask is not None and bool(self._mask.all()):
            # Attention is faster without a mask that hides nothing.
            self._mask = None

    def _move(self, rows: Tensor) -> None:
        """Keep these rows of the buffers. Those that keep their places are not copied."""
        moved = (rows != torch.arange(len(rows))).nonzero()[:, 0]
        for layer in self.cache.layers:
            places, sources = moved.to(layer.keys.device), rows[moved].to(layer.keys.device)
            for states in (layer.keys, layer.values):
                states[places] = states[sources]
            layer.keys, layer.values = layer.keys[: len(rows)], layer.values[: len(rows)]

    def append(self, tokens: Tensor) -> None:
        if self.columns == self._room or (not self._room and self._fixed and self.may_join):
            self._make_room()
        if self._mask is not None and not self._room:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1))
        if self._mask is not None:
            self._mask[:, self.columns] = 1
        self._ids.copy_(tokens[:, None])
        self._position += 1
        self.logits = self._engine.next_logits(
            self.cache, input_ids=self._ids, attention_mask=self._mask, position_ids=self._position
        )
        self.columns += 1
        if self._room:
            self._column += 1

    def _make_room(self) -> None:
        """Copy the cache and the mask into buffers with room for up to a block of new columns."""
        from transformers_backend.buffers import Buffers

        self._room = (self.columns // _BLOCK + 1) * _BLOCK
        self._mask = torch.nn.functional.pad(self._whole_mask(), (0, self._room - self.columns))
        self._column = self._position.new_full((), self.columns)
        for number, layer in enumerate(self.cache.layers):
            self.cache.layers[number] = Buffers(*self._states(layer), self._room, self._column)

    def _states(self, layer: Any) -> tuple[Tensor, Tensor]:
        return layer.keys[..., : self.columns, :], layer.values[..., : self.columns, :]

    @property
    def may_join(self) -> bool:
        """Whether its cache holds keys and values of every token, and nothing else."""
        from transformers.cache_utils import DynamicLayer

        layers = self.cache.layers
        return self._room > 0 or all(type(layer) is DynamicLayer and layer.keys is not None for layer in layers)

    def join(self, other: CachedRows) -> None:
        """Take in the rows of another, behind these. Its shares become shares of these.

        If it raises, for want of memory for example, nothing has changed.
        """
        columns, cache = max(self.columns, other.columns), _new_cache(self._engine)

        def both(mine: Tensor, others: Tensor) -> Tensor:
            return torch.cat([_widened(mine, columns), _widened(others, columns)])

        for number, (mine, others) in enumerate(zip(self.cache.layers, other.cache.layers, strict=True)):
            keys, values = map(both, self._states(mine), other._states(others))
            cache.update(keys, values, number)
        mask = both(self._whole_mask()[..., None], other._whole_mask()[..., None])[..., 0]
        ids, position = torch.cat([self._ids, other._ids]), torch.cat([self._position, other._position])
        logits, needed = torch.cat([self.logits, other.logits]), None if bool(mask.all()) else mask
        for share in other.shares:
            share.growing, share.rows = self, [len(self.logits) + row for row in share.rows]
        self.shares, other.shares = self.shares + other.shares, []
        self.logits, self.cache, self.columns, self._room = logits, cache, columns, 0
        self._ids, self._position, self._mask = ids, position, needed

    def _whole_mask(self) -> Tensor:
        if self._mask is None:
            return self._position.new_ones(len(self._position), self.columns)
        return self._mask[:, : self.columns]


class UncachedRows(GrowingRows):
    """Rows of the same length that are read from the start for every token: slow, and right for every causal model."""

    def __init__(self, engine: CausalLM, prompts: Ragged) -> None:
        super().__init__()
        self._engine = engine
        self._ids = prompts.values.view(len(prompts), -1).to(engine.device)
        self.columns = self._ids.shape[1]
        self.logits = engine.last_logits(self._ids)

    def keep(self, rows: Tensor) -> None:
        self._ids = self._ids[rows.to(self._ids.device)]

    def append(self, tokens: Tensor) -> None:
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=-1)
        self.columns += 1
        self.logits = self._engine.last_logits(self._ids)


def _widened(states: Tensor, columns: int) -> Tensor:
    """Return ``[..., columns, size]``, with zeros in front."""
    *outer, own, size = states.shape
    return states if own == columns else torch.cat([states.new_zeros(*outer, columns - own, size), states], dim=-2)


def _new_cache(engine: CausalLM) -> Any:
    """Return an empty cache of the kinds that the model's layers need (attention, windows, recurrent states)."""
    from transformers import DynamicCache

    return DynamicCache(config=engine.base.config)
