"""An engine in this process works on as many rows and tokens at a time as `vllm.LLM` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from corelm import Backend
from engines.vllm.conftest import SMALL
from engines.vllm.engine_access import plugin_engine

Open = Callable[..., Backend]


def limits(config: Any) -> tuple[int, int]:
    """Return the rows and the tokens that vLLM's scheduler gives to one step of the model."""
    scheduler = config.scheduler_config
    return scheduler.max_num_seqs, scheduler.max_num_batched_tokens


@pytest.mark.parametrize("engine", [pytest.param("async", marks=pytest.mark.nightly), "sync"])
def test_the_limits_are_those_of_the_llm_class(open_vllm: Open, tiny_folder: Path, engine: str) -> None:
    # `create_engine_config` writes the limits to the arguments, so each context gets new ones.
    of_llm, of_a_bare_engine = (
        limits(EngineArgs(model=str(tiny_folder), **SMALL).create_engine_config(context))
        for context in (UsageContext.LLM_CLASS, UsageContext.ENGINE_CONTEXT)
    )
    assert all(more > less for more, less in zip(of_llm, of_a_bare_engine, strict=True)), "this test can show nothing"
    with open_vllm(engine=engine) as backend:
        assert limits(plugin_engine(backend).llm.vllm_config) == of_llm
