"""The conformance kit on the transformers plugin and a tiny model, wherever the engine runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

from corelm_testing import BackendConformance
from helpers import oracle as plain
from helpers.oracle_kit import OracleKit, lora_adapters
from helpers.tiny_models import tiny_model, tiny_tokenizer


class TransformersPromises(OracleKit):
    """What the kit has to know of the plugin. A subclass opens the backend."""

    model: ClassVar[nn.Module] = tiny_model()
    # By default the KV cache stays when weights change in the middle of an answer.
    recomputes_in_flight = False

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A folder with the model and its tokenizer."""
        folder = tmp_path_factory.mktemp("model")
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

    def new_weights(self) -> tuple[dict[str, Any], Callable[[list[int], float], Tensor]]:
        other = tiny_model(seed=1)
        return other.state_dict(), lambda ids, temperature: plain.logprobs(other, ids, temperature)

    def new_adapters(self) -> list[tuple[dict[str, Any], Callable[[list[int], float], Tensor]]]:
        return lora_adapters(tiny_model)

    def engine_sampling(self) -> dict[str, Any]:
        # The backend passes engine_kwargs to transformers' own generate, which it uses for beams only.
        return {"num_beams": 2, "temperature": 0.0, "engine_kwargs": {"no_repeat_ngram_size": 1}}


class TransformersConformance(TransformersPromises, BackendConformance):
    """The whole kit. A subclass opens the backend."""
