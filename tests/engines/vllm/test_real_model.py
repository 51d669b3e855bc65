"""A trained model on a real vLLM, in float32, against its plain forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from corelm import Backend
from helpers.real_checks import FEW, Rows, check_numbers, plain_model, rows_of
from helpers.real_model import real_model


@pytest.fixture(scope="module")
def backend(open_vllm: Callable[..., Backend]) -> Iterator[Backend]:
    # In this process, which starts sooner, and with room for 5,000 tokens.
    room = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 28}
    with open_vllm(real_model(), engine="sync", return_support=True, **room) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain() -> Any:
    return plain_model(real_model())


@pytest.fixture(scope="module")
def rows(backend: Backend) -> Rows:
    return rows_of(backend.tokenizer)


def test_numbers_are_those_of_the_plain_forward(backend: Backend, plain: Any, rows: Rows) -> None:
    check_numbers(backend, plain, [rows[number] for number in FEW], 6)


@pytest.mark.nightly
def test_numbers_for_all_prompts_are_those_of_the_plain_forward(backend: Backend, plain: Any, rows: Rows) -> None:
    check_numbers(backend, plain, rows, 12)
