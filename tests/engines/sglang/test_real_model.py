"""A trained model on a real SGLang server, in float32, against its plain forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import corelm
from corelm import Backend
from engines.sglang_on_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT
from helpers.real_checks import FEW, Rows, check_numbers, plain_model, rows_of
from helpers.real_model import real_model


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    settings = CPU_ARGUMENTS | {"progress": False, "context_length": 512, "max_total_tokens": 8192}
    with corelm.get_backend("sglang", real_model(), env=CPU_ENVIRONMENT, **settings) as opened:
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
