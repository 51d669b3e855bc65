"""The conformance kit on the transformers plugin and a tiny model, wherever the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from corelm.testing import BackendConformance
from helpers import oracle as plain
from helpers.tiny_models import tiny_model, tiny_tokenizer


class TransformersConformance(BackendConformance):
    """A subclass opens the backend. The oracle is a plain float32 forward pass of the same model."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A folder with the model and its tokenizer."""
        folder = tmp_path_factory.mktemp("model")
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

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


#: The oracle's own copy of the model, which no backend touches.
MODEL: nn.Module = tiny_model()
