"""The conformance kit on real SGLang servers, launched and behind a URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

from corelm import Backend
from corelm_testing import BackendConformance
from corelm_testing.weights import AdapterPromises
from engines.sglang_on_cpu import LORA_ARGUMENTS, LORA_ENVIRONMENT
from helpers import oracle as plain
from helpers.oracle_kit import ManyRows, OracleKit, lora_adapters
from helpers.selected_kit import SelectedKit
from helpers.tiny_models import tiny_model

OTHER: nn.Module = tiny_model(seed=1)


SHARED = {"update_weights": "other tests share the server; TestLaunched and test_weights.py show it"}


class _SGLangPromises(OracleKit):
    model: ClassVar[nn.Module] = tiny_model()
    # Every draw is one request to a server that shares two cores with the tests.
    draws = 500

    def engine_sampling(self) -> dict[str, Any]:
        return {"engine_kwargs": {"logit_bias": {"7": 20.0}}}


class TestShared(ManyRows, _SGLangPromises, BackendConformance):
    """The whole kit on one server that was launched. Its log-probs are scaled: of the logits over the temperature."""

    not_shown = SHARED

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, shared: Backend, connect: Callable[[Backend], Backend]) -> Callable[[], Backend]:
        return lambda: connect(shared)


@pytest.mark.nightly
class TestLaunched(_SGLangPromises, BackendConformance):
    """Launch a server for each backend that the kit opens, about ten."""

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, launch: Callable[[], Backend], other_folder: Path) -> Callable[[], Backend]:
        cls.other_folder = other_folder
        return launch

    def new_weights(self) -> tuple[Path, Callable[[list[int], float], Tensor]]:
        return self.other_folder, lambda ids, temperature: plain.logprobs(OTHER, ids, temperature)


class TestBehindURL(_SGLangPromises, SelectedKit):
    """Connect to a running server that other tests share. Its log-probs are raw, and its weights stay."""

    not_shown = SHARED

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, original: Backend, connect: Callable[[Backend], Backend]) -> Callable[[], Backend]:
        return lambda: connect(original)


@pytest.mark.nightly
class TestHonouringSeeds(_SGLangPromises, BackendConformance):
    """Connect to a running server that honours seeds."""

    not_shown = SHARED

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, seeded: Backend, connect: Callable[[Backend], Backend]) -> Callable[[], Backend]:
        return lambda: connect(seeded)


@pytest.mark.nightly
class TestAdapters(OracleKit, AdapterPromises):
    model: ClassVar[nn.Module] = tiny_model()

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, launch: Callable[..., Backend]) -> Callable[[], Backend]:
        return lambda: launch(env=LORA_ENVIRONMENT, **LORA_ARGUMENTS)

    def new_adapters(self) -> list[tuple[dict[str, Any], Callable[[list[int], float], Tensor]]]:
        return lora_adapters(tiny_model)
