"""`RealModelPromises`: the tests of a trained model that every real engine passes."""

from __future__ import annotations

from typing import Any

import pytest

from corelm import Backend
from helpers.real_checks import FEW, Rows, check_numbers, plain_model, rows_of
from helpers.real_model import real_model


class RealModelPromises:
    """A subclass is in a module with a fixture `backend`, which opens the model of `real_model` in float32."""

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls) -> Any:
        return plain_model(real_model())

    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls, backend: Backend) -> Rows:
        return rows_of(backend.tokenizer)

    def test_numbers_are_those_of_the_plain_forward(self, backend: Backend, plain: Any, rows: Rows) -> None:
        check_numbers(backend, plain, [rows[number] for number in FEW], 6)

    @pytest.mark.nightly
    def test_numbers_for_all_prompts_are_those_of_the_plain_forward(
        self, backend: Backend, plain: Any, rows: Rows
    ) -> None:
        check_numbers(backend, plain, rows, 12)
