"""`OracleKit`: what the conformance kit compares an engine with, a plain float32 forward pass of the same model."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from helpers import oracle


class OracleKit:
    """The oracle of the conformance kit. It comes before the kit among the base classes.

    Attributes:
        model: the oracle's own copy of the model, which no backend touches.
    """

    model: ClassVar[nn.Module]

    def oracle(self, ids: list[int], temperature: float) -> Tensor:
        return oracle.logprobs(self.model, ids, temperature)

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        return (oracle.next_logits(self.model, ids)[-1] / temperature).log_softmax(-1)
