"""`OracleKit`: what the conformance kit compares an engine with, a plain float32 forward pass of the same model."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from helpers import oracle
from helpers.lora import lora, merged


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


def lora_adapters(make_model: Callable[[], Any]) -> list[tuple[dict[str, Any], Callable[[list[int], float], Tensor]]]:
    """Return two LoRA adapters for ``make_model()``, as the conformance kit asks for them."""
    adapters = []
    for seed in range(2):
        state, config = lora(make_model(), seed=seed)
        model = merged(make_model(), state)
        adapters.append(
            (
                {"weights": state, "config": config},
                lambda ids, temperature, model=model: oracle.logprobs(model, ids, temperature),
            )
        )
    return adapters
