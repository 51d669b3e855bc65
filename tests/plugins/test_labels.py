"""Every engine's plugin labels log-probs alike: as core does, from the request."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from corelm.errors import EngineError
from corelm.spec import Capabilities, GenerateRequest, GenerateResult, Provenance, RowFailure, SamplingParams
from corelm_testing.toy import ToyBackend
from helpers.canned_replies import answering
from helpers.each import case
from helpers.requests import generation
from helpers.tiny_models import VOCAB, tiny_model, tiny_tokenizer
from sglang_backend import SGLangBackend
from sglang_backend.capabilities import ServerInfo
from transformers_backend import TransformersBackend
from vllm_backend import protocol_inprocess
from vllm_backend.capabilities_http import ServerInfo as VLLMInfo
from vllm_backend.server import VLLMServer

Generate = Callable[[GenerateRequest], GenerateResult]

LOST = EngineError("the server is gone")
SEEDS = torch.tensor([1])
CAPABILITIES = Capabilities(vocab_size=VOCAB, max_context=64)


def vllm_in_process(request: GenerateRequest) -> GenerateResult:
    info: Any = SimpleNamespace(tokenizer=tiny_tokenizer(), capabilities=CAPABILITIES)
    return protocol_inprocess.generation_result(request, [RowFailure("lost")], info)


def vllm_over_http(request: GenerateRequest) -> GenerateResult:
    info = VLLMInfo(
        capabilities=CAPABILITIES, tokenizer=tiny_tokenizer(), model="m", name="m", routes=frozenset(), fields=None
    )
    return answering(VLLMServer, info, LOST).generate(request)


def sglang_server(request: GenerateRequest) -> GenerateResult:
    info = ServerInfo(CAPABILITIES, tiny_tokenizer(), "a-model", weight_label="0")
    return answering(SGLangBackend, info, LOST).generate(request)


def transformers(request: GenerateRequest) -> GenerateResult:
    return opened("transformers").generate(request)


def toy(request: GenerateRequest) -> GenerateResult:
    return opened("toy").generate(request)


@cache
def opened(name: str) -> Any:
    return ToyBackend.open() if name == "toy" else TransformersBackend.open(tiny_model(), tokenizer=tiny_tokenizer())


def label(generate: Generate, logprobs: Any, sampling: dict[str, Any]) -> dict[str, Any]:
    request = generation([[5, 6]], logprobs, max_new_tokens=3, **sampling, seeds=SEEDS, stop_ids=frozenset({2}))
    result = generate(request)
    return {"mode": result.mode, "temperature": result.temperature, "support": result.support}


@pytest.mark.parametrize("generate", [vllm_in_process, vllm_over_http, sglang_server, transformers, toy])
@pytest.mark.parametrize("logprobs", ["none", "raw", "processed"])
def test_every_engine_labels_sampled_log_probs_as_core_does(generate: Generate, logprobs: Any) -> None:
    for sampling in (
        {},
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"temperature": 0.5, "top_p": 0.9},
        {"top_k": 3},
        {"min_new_tokens": 2},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    ):
        with case(sampling):
            assert label(generate, logprobs, sampling) == Provenance.label(logprobs, SamplingParams(**sampling))


@pytest.mark.parametrize("generate", [vllm_in_process, vllm_over_http, sglang_server])
def test_engine_kwargs_make_the_support_truncated_on_every_engine_that_takes_them(generate: Generate) -> None:
    assert label(generate, "processed", {"engine_kwargs": {"logit_bias": {"3": 1.0}}})["support"] == "truncated"
