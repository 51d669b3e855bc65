"""The conformance kit on the transformers plugin in an actor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import corelm
from corelm import Backend
from corelm.testing import BackendConformance
from helpers import oracle as plain
from helpers import tiny_models


class TestTransformersInAnActor(BackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, model: Path) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("ray", model, inner="transformers", num_cpus=0.2)

    def oracle(self, ids: list[int], temperature: float) -> Tensor:
        return plain.logprobs(MODEL, ids, temperature)

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        return (plain.next_logits(MODEL, ids)[-1] / temperature).log_softmax(-1)

    def new_weights(self) -> tuple[dict[str, Any], Callable[[list[int], float], Tensor]]:
        other = tiny_models.tiny_model(seed=1)
        return other.state_dict(), lambda ids, temperature: plain.logprobs(other, ids, temperature)

    def engine_sampling(self) -> dict[str, Any]:
        return {"num_beams": 2, "temperature": 0.0, "engine_kwargs": {"no_repeat_ngram_size": 1}}


#: The oracle's own copy of the model.
MODEL: nn.Module = tiny_models.tiny_model()
