"""Every engine's plugin labels log-probs alike: as core does, from the request."""

from __future__ import annotations

import itertools
from functools import cache
from types import SimpleNamespace
from typing import Any

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

LOST = EngineError("the server is gone")


def vllm_in_process(request: GenerateRequest) -> GenerateResult:
    capabilities = SimpleNamespace(updates_in_flight=False)
    info: Any = SimpleNamespace(tokenizer=tiny_tokenizer(), capabilities=capabilities)
    return protocol_inprocess.generation_result(request, [RowFailure("lost")], info)


def vllm_over_http(request: GenerateRequest) -> GenerateResult:
    capabilities = Capabilities(vocab_size=VOCAB, max_context=64)
    info = VLLMInfo(
        capabilities=capabilities, tokenizer=tiny_tokenizer(), model="m", name="m", routes=frozenset(), fields=None
    )
    return answering(VLLMServer, info, LOST).generate(request)


def sglang_server(request: GenerateRequest) -> GenerateResult:
    info = ServerInfo(Capabilities(vocab_size=VOCAB, max_context=64), tiny_tokenizer(), "a-model", weight_label="0")
    return answering(SGLangBackend, info, LOST).generate(request)


@cache
def engines() -> dict[str, Any]:
    opened = TransformersBackend.open(tiny_model(), tokenizer=tiny_tokenizer())
    return {"transformers": opened, "toy": ToyBackend.open()}


def transformers(request: GenerateRequest) -> GenerateResult:
    return engines()["transformers"].generate(request)


def toy(request: GenerateRequest) -> GenerateResult:
    return engines()["toy"].generate(request)


def test_every_engine_labels_sampled_log_probs_as_core_does():
    for engine, sampling, logprobs in itertools.product(
        [vllm_in_process, vllm_over_http, sglang_server, transformers, toy],
        [
            {},
            {"temperature": 0.0},
            {"temperature": 0.5},
            {"temperature": 0.5, "top_p": 0.9},
            {"top_k": 3},
            {"min_new_tokens": 2},
            {"presence_penalty": 0.5, "repetition_penalty": 1.2},
        ],
        ["none", "raw", "processed"],
    ):
        with case(engine, sampling, logprobs):
            label = Provenance.label(logprobs, SamplingParams(**sampling))
            result = engine(asked(logprobs, **sampling))
            assert {"mode": result.mode, "temperature": result.temperature, "support": result.support} == label


def test_engine_kwargs_make_the_support_truncated_on_every_engine_that_takes_them():
    for engine in [vllm_in_process, vllm_over_http, sglang_server]:
        with case(engine):
            assert engine(asked("processed", engine_kwargs={"logit_bias": {"3": 1.0}})).support == "truncated"


def asked(logprobs: Any, **sampling: Any) -> GenerateRequest:
    return generation(
        [[5, 6]],
        logprobs,
        max_new_tokens=3,
        **sampling,
        seeds=torch.tensor([1]),
        stop_ids=frozenset({2}),
        request_ids=("one",),
    )
