"""The transformers backend passes the conformance suite, fast and plain.

The oracle is a plain float32 forward pass of the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

import corelm
from corelm import Backend
from corelm.testing import BackendConformance
from helpers import oracle as plain
from helpers.tiny_models import tiny_model, tiny_tokenizer


class TestFast(BackendConformance):
    fast: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), fast=cls.fast)

    def oracle(self, ids: list[int], temperature: float) -> Tensor:
        return plain.logprobs(MODEL, ids, temperature)

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        return (plain.next_logits(MODEL, ids)[-1] / temperature).log_softmax(-1)

    def new_weights(self) -> tuple[dict[str, Any], Callable[[list[int], float], Tensor]]:
        other = tiny_model(seed=1)
        return other.state_dict(), lambda ids, temperature: plain.logprobs(other, ids, temperature)

    def engine_sampling(self) -> dict[str, Any]:
        # The backend passes engine_kwargs to transformers' own generate, which it uses for beams only.
        return {"num_beams": 2, "temperature": 0.0, "engine_kwargs": {"no_repeat_ngram_size": 1}}


class TestPlain(TestFast):
    fast = False


#: The oracle's own copy of the model, which no backend touches.
MODEL: nn.Module = tiny_model()
