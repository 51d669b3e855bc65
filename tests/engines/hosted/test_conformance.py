"""The conformance kit on the real vLLM and the real SGLang, each in a process of its own environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

import corelm
from corelm import Backend
from corelm.errors import InvalidRequestError
from corelm_testing import BackendConformance
from helpers import oracle as plain
from helpers.cpu_engines import ENGINES
from helpers.oracle_kit import OracleKit
from helpers.tiny_models import tiny_model, tiny_tokenizer


class _HostedConformance(OracleKit, BackendConformance):
    model: ClassVar[nn.Module] = tiny_model()
    engine: ClassVar[str]
    logit_bias: ClassVar[dict[Any, float]]
    other: ClassVar[Path]

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Backend]:
        cls.other = tmp_path_factory.mktemp("other")
        OTHER.save_pretrained(cls.other)
        tiny_tokenizer().save_pretrained(cls.other)
        return lambda: corelm.get_backend(cls.engine, folder, **ENGINES[cls.engine])

    def engine_sampling(self) -> dict[str, Any]:
        return {"engine_kwargs": {"logit_bias": self.logit_bias}}

    def test_an_unknown_option_is_refused_before_the_engine_opens(self, backend: Backend) -> None:
        # The engine is in another environment.
        with pytest.raises(InvalidRequestError) as caught:
            corelm.get_backend(self.engine, python=ENGINES[self.engine]["python"], no_such_option=1)
        assert caught.value.field == "no_such_option"


class TestHostedVLLM(_HostedConformance):
    engine = "vllm"
    logit_bias: ClassVar[dict[Any, float]] = {7: 20.0}

    def new_weights(self) -> tuple[dict[str, Any], Callable[[list[int], float], Tensor]]:
        return OTHER.state_dict(), lambda ids, temperature: plain.logprobs(OTHER, ids, temperature)


class TestHostedSGLang(_HostedConformance):
    engine = "sglang"
    logit_bias: ClassVar[dict[Any, float]] = {"7": 20.0}
    # Every draw is one request to a server that shares two cores with the tests.
    draws = 500

    def new_weights(self) -> tuple[Path, Callable[[list[int], float], Tensor]]:
        return self.other, lambda ids, temperature: plain.logprobs(OTHER, ids, temperature)


#: The oracle's own copies of the model.
MODEL: nn.Module = tiny_model(hidden_size=128)
OTHER: Any = tiny_model(hidden_size=128, seed=1)
