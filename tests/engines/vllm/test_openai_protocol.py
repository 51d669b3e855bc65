"""The `openai` backend on a real vLLM server: a selection of the conformance kit, on raw and on processed log-probs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from torch import nn

import corelm
from corelm import Backend
from engines.vllm.launch import VLLMServerProcess
from helpers.oracle_kit import OracleKit
from helpers.selected_kit import SelectedKit
from helpers.tiny_models import tiny_model, tiny_tokenizer


class _OpenAIProtocol(OracleKit, SelectedKit):
    model: ClassVar[nn.Module] = tiny_model(hidden_size=128)
    arguments: ClassVar[tuple[str, ...]] = ()
    mode: ClassVar[str]
    # Every draw is one request to a server that shares two cores with the tests.
    draws = 500

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Backend]:
        log = tmp_path_factory.mktemp("log") / "server.txt"
        with VLLMServerProcess(tiny_folder, log, *cls.arguments, development=False) as server:
            options = {"base_url": server.url, "api_key": server.key, "tokenizer": tiny_tokenizer()}
            yield lambda: corelm.get_backend("openai", **options)

    def test_all_of_the_protocol_is_found_out(self, backend: Backend) -> None:
        found = backend.capabilities
        assert found.generation_modes == {self.mode} and found.score and found.per_answer_seeds
        assert found.sampling.keys() == {"temperature", "top_p", "stop", "presence_penalty", "frequency_penalty"}


class TestRawLogprobs(_OpenAIProtocol):
    mode = "raw"


@pytest.mark.nightly
class TestProcessedLogprobs(_OpenAIProtocol):
    mode = "processed"
    arguments = ("--logprobs-mode", "processed_logprobs")
