"""A trained model on a real SGLang server, in float32, against its plain forward: by its own routes and by OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import corelm
from corelm import Backend
from engines.sglang_on_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT
from helpers.real_engine import RealModelPromises
from helpers.real_model import real_model
from sglang_backend import SGLangBackend

CONTEXT = 1024


@pytest.fixture(scope="module")
def own() -> Iterator[Backend]:
    settings = CPU_ARGUMENTS | {"progress": False, "context_length": CONTEXT, "max_total_tokens": 8192}
    with corelm.get_backend("sglang", real_model(), env=CPU_ENVIRONMENT, **settings) as opened:
        yield opened


class TestRealModel(RealModelPromises):
    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, own: Backend) -> Backend:
        return own


@pytest.fixture(scope="module")
def protocol(own: Backend) -> Iterator[Backend]:
    engine = own.engine.plugin
    assert isinstance(engine, SGLangBackend) and engine.launched is not None
    where = {"base_url": engine.launched.base_url, "api_key": engine.launched.api_key}
    # SGLang ends an answer one token before the context is full.
    with corelm.get_backend("openai", **where, tokenizer=real_model(), max_context=CONTEXT - 1) as opened:
        yield opened


@pytest.mark.nightly
class TestOpenAIProtocol(RealModelPromises):
    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, protocol: Backend) -> Backend:
        return protocol
