"""A trained model on a real SGLang server, in float32, against its plain forward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import corelm
from corelm import Backend
from engines.sglang_on_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT
from helpers.real_engine import RealModelPromises
from helpers.real_model import real_model


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    settings = CPU_ARGUMENTS | {"progress": False, "context_length": 512, "max_total_tokens": 8192}
    with corelm.get_backend("sglang", real_model(), env=CPU_ENVIRONMENT, **settings) as opened:
        yield opened


class TestRealModel(RealModelPromises):
    pass
