"""`MaskedCategorical`: next-token distributions of which only some positions count."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints


class MaskedCategorical(Distribution):
    """A categorical distribution at each position of ``[*batch, time]``; positions outside `mask` count for nothing.

    Args:
        logits: float[*batch, time, vocab], unnormalised. Gradients flow through `log_prob` and `entropy`.
        mask: bool[*batch, time].

    At a masked position `log_prob` and `entropy` are 0.0 (with no gradient) and `mode` and `sample` are -100, which
    losses ignore.
    """

    arg_constraints: ClassVar = {"logits": constraints.independent(constraints.real, 1)}
    IGNORED: ClassVar = -100

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        if mask.shape != logits.shape[:-1]:
            raise ValueError(f"mask {tuple(mask.shape)} does not cover logits {tuple(logits.shape)}")
        self.logits = logits
        self.mask = mask
        super().__init__(batch_shape=mask.shape, validate_args=False)

    @cached_property
    def _selected(self) -> Tensor:
        """float32[n, vocab]: the logits of the positions that count; the others are never normalised."""
        return self.logits[self.mask].float()

    def _spread(self, values: Tensor, filler: float) -> Tensor:
        return values.new_full(self.mask.shape, filler).masked_scatter(self.mask, values)

    def log_prob(self, value: Tensor) -> Tensor:
        """float32[*batch, time]: log-probability of the ids ``value[*batch, time]``, in nats."""
        chosen = self._selected.gather(-1, value[self.mask].unsqueeze(-1)).squeeze(-1)
        return self._spread(chosen - self._selected.logsumexp(-1), 0.0)

    def entropy(self) -> Tensor:
        """float32[*batch, time], in nats."""
        log_probs = self._selected.log_softmax(-1)
        return self._spread(-(log_probs.exp() * log_probs).nan_to_num(0.0).sum(-1), 0.0)

    @property
    def mode(self) -> Tensor:
        """int64[*batch, time]: the most likely id."""
        return self._spread(self._selected.argmax(-1), self.IGNORED)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """int64[*sample_shape, *batch, time]."""
        count = int(torch.Size(sample_shape).numel())
        with torch.no_grad():
            drawn = torch.multinomial(self._selected.softmax(-1), count, replacement=True)
            spread = torch.stack([self._spread(column, self.IGNORED) for column in drawn.unbind(-1)])
        return spread.reshape(*sample_shape, *self.mask.shape)
