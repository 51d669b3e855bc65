"""`OracleKit`: what the conformance kit compares an engine with, a plain float32 forward pass of the same model."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from corelm import Backend
from helpers import oracle
from helpers.lora import lora, merged
from helpers.tiny_models import random_rows


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


class ManyRows:
    """A test of many rows in one call, next to the kit."""

    def test_64_rows_of_all_lengths_in_one_call_are_those_of_the_model(self: Any, backend: Backend) -> None:
        rows = random_rows(*(1 + (37 * i * i) % 440 for i in range(64)), seed=3)
        answers = backend.generate(rows, {"max_new_tokens": 48, "temperature": 0.0}, logprobs="raw")
        self.assert_true_answers(rows, answers)
        for prompt, answer, reason in zip(rows, answers.ids.tolist(), answers.finish_reasons, strict=True):
            ends = [at for at, token in enumerate(answer, 1) if token in backend.eos_token_ids]
            assert (ends, reason) == ([len(answer)], "stop") if ends else (len(answer), reason) == (48, "length")
            logits = oracle.next_logits(self.model, [*prompt, *answer])[len(prompt) - 1 : -1]
            chosen = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
            # Of ids that rounding could swap, either may be the likeliest.
            assert float((logits.amax(-1) - chosen).max()) <= self.tolerance
        self.assert_true_scores(rows, backend.score_logprobs(rows))


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
