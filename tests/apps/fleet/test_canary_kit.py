"""The theme of weights of the conformance kit with a canary in front of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import corelm
from corelm import Backend
from corelm_testing.weights import WeightPromises
from helpers import oracle as plain
from helpers.tiny_models import tiny_model, tiny_tokenizer


class TestTransformers(WeightPromises):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), canary=True)

    def oracle(self, ids: list[int], temperature: float) -> Tensor:
        return plain.logprobs(tiny_model(), ids, temperature)

    def new_weights(self) -> tuple[dict[str, Any], Callable[[list[int], float], Tensor]]:
        other = tiny_model(seed=1)
        return other.state_dict(), lambda ids, temperature: plain.logprobs(other, ids, temperature)
