"""A trained model on a real vLLM, in float32, against its plain forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from corelm import Backend
from helpers.real_engine import RealModelPromises
from helpers.real_model import real_model


@pytest.fixture(scope="module")
def backend(open_vllm: Callable[..., Backend]) -> Iterator[Backend]:
    # In this process, which starts sooner, and with room for 5,000 tokens.
    room = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 28}
    with open_vllm(real_model(), engine="sync", return_support=True, **room) as opened:
        yield opened


class TestRealModel(RealModelPromises):
    pass
