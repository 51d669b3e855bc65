"""`CachedRows` and `UncachedRows`: rows that grow by one token at a time, and the logits that follow each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from corelm.spec import Ragged
from corelm_engine_kit.answers import without
from transformers_backend.engine import CausalLM


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

    @abstractmethod
    def expand(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was, int64[n] on the CPU; a row may be taken several times."""

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
    """Rows whose past is in a cache. Shorter prompts are padded on the left."""

    def __init__(self, engine: CausalLM, cache: Any, prompts: Ragged) -> None:
        super().__init__()
        self._engine = engine
        self._cache = cache
        inputs: dict[str, Any] = engine.inputs(prompts, "left")
        self._mask: Tensor | None = inputs.pop("attention_mask")
        # How many columns of each row are padding. This stays on the CPU, where it is read without waiting.
        self._padding = prompts.lengths.max() - prompts.lengths
        self._position = inputs["position_ids"][:, -1:]
        self.columns = inputs["input_ids"].shape[1]
        self.logits = engine.next_logits(self._cache, attention_mask=self._mask, **inputs)

    def expand(self, rows: Tensor) -> None:
        self._reorder(rows)
        self.logits = self.logits[rows.to(self.logits.device)]

    def keep(self, rows: Tensor) -> None:
        self._reorder(rows)

    def append(self, tokens: Tensor) -> None:
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=-1)
        self._position = self._position + 1
        self.columns += 1
        self.logits = self._engine.next_logits(
            self._cache, input_ids=tokens[:, None], attention_mask=self._mask, position_ids=self._position
        )

    @property
    def may_join(self) -> bool:
        """Whether its cache holds keys and values of every token, and nothing else."""
        from transformers.cache_utils import DynamicLayer

        return all(
            (type(layer) is DynamicLayer or getattr(layer, "joins", False)) and layer.keys is not None
            for layer in self._cache.layers
        )

    def join(self, other: CachedRows, cache: Any) -> None:
        """Take in the rows of another, behind these. Its shares become shares of these.

        Args:
            cache: an empty one, which holds the states of both from now on.

        Raises:
            OutOfMemoryError: there is no memory for both. Nothing has changed.
        """
        columns = max(self.columns, other.columns)

        def both(mine: Tensor, others: Tensor) -> Tensor:
            return torch.cat([_widened(mine, columns), _widened(others, columns)])

        for number, (mine, others) in enumerate(zip(self._cache.layers, other._cache.layers, strict=True)):
            cache.update(both(mine.keys, others.keys), both(mine.values, others.values), number)
        mask = both(self._whole_mask(), other._whole_mask())[..., 0]
        padding = torch.cat([self._padding + (columns - self.columns), other._padding + (columns - other.columns)])
        position = torch.cat([self._position, other._position])
        logits = torch.cat([self.logits, other.logits])
        self._padding, self._mask = padding, mask if bool(padding.any()) else None
        for share in other.shares:
            share.growing, share.rows = self, [len(self.logits) + row for row in share.rows]
        self.shares, other.shares = self.shares + other.shares, []
        self._position, self.logits, self._cache, self.columns = position, logits, cache, columns

    def _whole_mask(self) -> Tensor:
        if self._mask is not None:
            return self._mask[..., None]
        return self._position.new_ones(len(self.logits), self.columns, 1)

    def _reorder(self, rows: Tensor) -> None:
        self._cache.reorder_cache(rows)
        self._padding = self._padding[rows]
        there = rows.to(self._position.device)
        self._position = self._position[there]
        # Attention is faster without a mask.
        self._mask = self._mask[there] if self._mask is not None and bool(self._padding.any()) else None


class UncachedRows(GrowingRows):
    """Rows of the same length that are read from the start for every token: slow, and right for every causal model."""

    def __init__(self, engine: CausalLM, prompts: Ragged) -> None:
        super().__init__()
        self._engine = engine
        self._ids = prompts.values.view(len(prompts), -1).to(engine.device)
        self.columns = self._ids.shape[1]
        self.logits = engine.last_logits(self._ids)

    def expand(self, rows: Tensor) -> None:
        self.logits = self.logits[rows.to(self.logits.device)]
        self.keep(rows)

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
