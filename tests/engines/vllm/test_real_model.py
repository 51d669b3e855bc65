"""A trained model on a real vLLM, in float32, against its plain forward: in process, and by the routes of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import corelm
from corelm import Backend
from engines.vllm.launch import VLLMServerProcess
from helpers.real_engine import RealModelPromises
from helpers.real_model import real_model

#: Room for 5,000 tokens.
ROOM = 1 << 28


@pytest.fixture(scope="module")
def backend(open_vllm: Callable[..., Backend]) -> Iterator[Backend]:
    # In this process, which starts sooner.
    room = {"max_model_len": 1024, "kv_cache_memory_bytes": ROOM}
    with open_vllm(real_model(), engine="sync", return_support=True, **room) as opened:
        yield opened


class TestRealModel(RealModelPromises):
    pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerProcess]:
    room = ("--max-model-len", "1024", "--kv-cache-memory-bytes", str(ROOM))
    with VLLMServerProcess(real_model(), tmp_path_factory.mktemp("log") / "server.txt", *room) as running:
        yield running


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["vllm", "openai"], scope="class")
class TestServer(RealModelPromises):
    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, server: VLLMServerProcess, name: str) -> Iterator[Backend]:
        options = {"base_url": server.url, "api_key": server.key, "tokenizer": real_model()}
        with corelm.get_backend(name, **options) as opened:
            yield opened
