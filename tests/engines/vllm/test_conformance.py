"""The conformance kit on vLLM in this process. The oracle is a plain float32 forward pass in transformers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

from corelm import Backend
from corelm_testing import BackendConformance, ConformanceBase
from corelm_testing.weights import AdapterPromises
from helpers import oracle
from helpers.oracle_kit import ManyRows, OracleKit, lora_adapters
from helpers.tiny_models import tiny_model


class InProcessPromises(OracleKit):
    """What the kit has to know of an engine in this process. A subclass opens the backend."""

    model: ClassVar[nn.Module] = tiny_model(hidden_size=128)

    def new_weights(self) -> tuple[dict[str, Any], Callable[[list[int], float], Tensor]]:
        other = tiny_model(hidden_size=128, seed=1)
        return other.state_dict(), lambda ids, temperature: oracle.logprobs(other, ids, temperature)

    def engine_sampling(self) -> dict[str, Any]:
        return {"engine_kwargs": {"logit_bias": {7: 20.0}}}


class InProcessConformance(InProcessPromises, BackendConformance):
    """The whole kit."""

    def test_scores_do_not_depend_on_requests_in_the_same_batch(self, backend: Backend) -> None:
        # vLLM samples a token after every scored row, in the same batch as these answers.
        rows = self.rows(backend, *range(2, 26))
        with ThreadPoolExecutor(1) as pool:
            sampling = {"max_new_tokens": 64, "ignore_eos": True, "top_p": 0.5, "temperature": 0.5}
            answers = pool.submit(backend.generate, rows, sampling, logprobs="none")
            while not answers.done():
                self.assert_true_scores(rows, backend.score_logprobs(rows))


class TestRawLogprobs(ManyRows, InProcessConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, open_vllm: Callable[..., Backend]) -> Callable[..., Backend]:
        return open_vllm


class TestSync(ManyRows, InProcessPromises, ConformanceBase):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, open_vllm: Callable[..., Backend]) -> Callable[[], Backend]:
        return lambda: open_vllm(engine="sync")


@pytest.mark.nightly
class TestProcessedLogprobs(InProcessConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, open_vllm: Callable[..., Backend]) -> Callable[[], Backend]:
        return lambda: open_vllm(logprobs_mode="processed_logprobs")


@pytest.mark.nightly
class TestAdapters(OracleKit, AdapterPromises):
    model: ClassVar[nn.Module] = tiny_model(hidden_size=128)

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, open_vllm: Callable[..., Backend]) -> Callable[[], Backend]:
        return lambda: open_vllm(enable_lora=True, max_lora_rank=8, max_loras=2)

    def new_adapters(self) -> list[tuple[dict[str, Any], Callable[[list[int], float], Tensor]]]:
        return lora_adapters(lambda: tiny_model(hidden_size=128))
