"""`CachedRows` and `UncachedRows`: rows that grow by one token at a time, and the logits that follow each of them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from corelm.spec import Ragged
from transformers_backend.engine import CausalLM


class GrowingRows(Protocol):
    """Rows of ids inside the model.

    Attributes:
        logits: float32[rows, vocab], the logits that follow the last token of each row.
    """

    logits: Tensor

    def expand(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was, int64[n] on the CPU; a row may be taken several times."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64[n] on the CPU. `logits` are out of date until the next `append`."""

    def append(self, tokens: Tensor) -> None:
        """Append one token to each row, int64[rows]."""


class CachedRows:
    """Rows whose past is in a cache. Shorter prompts are padded on the left."""

    def __init__(self, engine: CausalLM, cache: Any, prompts: Ragged) -> None:
        self._engine = engine
        self._cache = cache
        inputs: dict[str, Any] = engine.inputs(prompts, "left")
        self._mask: Tensor | None = inputs.pop("attention_mask")
        # How many columns of each row are padding. This stays on the CPU, where it is read without waiting.
        self._padding = prompts.lengths.max() - prompts.lengths
        self._position = inputs["position_ids"][:, -1:]
        self.logits = engine.next_logits(cache, attention_mask=self._mask, **inputs)

    def expand(self, rows: Tensor) -> None:
        self._reorder(rows)
        self.logits = self.logits[rows.to(self.logits.device)]

    def keep(self, rows: Tensor) -> None:
        self._reorder(rows)

    def append(self, tokens: Tensor) -> None:
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=-1)
        self._position = self._position + 1
        self.logits = self._engine.next_logits(
            self._cache, input_ids=tokens[:, None], attention_mask=self._mask, position_ids=self._position
        )

    def _reorder(self, rows: Tensor) -> None:
        self._cache.reorder_cache(rows)
        self._padding = self._padding[rows]
        there = rows.to(self._position.device)
        self._position = self._position[there]
        # Attention is faster without a mask.
        self._mask = self._mask[there] if self._mask is not None and bool(self._padding.any()) else None


class UncachedRows:
    """Rows of the same length that are read from the start for every token: slow, and right for every causal model."""

    def __init__(self, engine: CausalLM, prompts: Ragged) -> None:
        self._engine = engine
        self._ids = prompts.values.view(len(prompts), -1).to(engine.device)
        self.logits = engine.last_logits(self._ids)

    def expand(self, rows: Tensor) -> None:
        self.logits = self.logits[rows.to(self.logits.device)]
        self.keep(rows)

    def keep(self, rows: Tensor) -> None:
        self._ids = self._ids[rows.to(self._ids.device)]

    def append(self, tokens: Tensor) -> None:
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=-1)
        self.logits = self._engine.last_logits(self._ids)
