"""`RealModelPromises`: the tests of a trained model that every real engine passes."""

from typing import Any, ClassVar

import pytest

from corelm import Backend
from helpers.real_checks import (
    FEW,
    Rows,
    check_greedy,
    check_numbers,
    check_scores,
    check_tools,
    long_rows,
    plain_model,
    rows_of,
)
from helpers.real_model import real_model


class RealModelPromises:
    """A subclass is in a module with a fixture `backend`, which opens the model of `real_model` in float32."""

    #: Tokens of an answer in the test that every change runs.
    few_tokens: ClassVar[int] = 6

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls) -> Any:
        return plain_model(real_model())

    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls, backend: Backend) -> Rows:
        return rows_of(backend.tokenizer)

    def test_numbers_are_those_of_the_plain_forward(self, backend: Backend, plain: Any, rows: Rows) -> None:
        check_numbers(backend, plain, [rows[number] for number in FEW], self.few_tokens)

    @pytest.mark.nightly
    def test_numbers_for_all_prompts_are_those_of_the_plain_forward(
        self, backend: Backend, plain: Any, rows: Rows
    ) -> None:
        assert len(rows) == 40
        check_numbers(backend, plain, rows, 12)

    @pytest.mark.nightly
    def test_rows_may_be_nearly_as_long_as_the_context(self, backend: Backend, plain: Any) -> None:
        rows = long_rows(backend, 8)
        check_scores(backend, plain, rows)
        check_greedy(backend, plain, rows, 8)

    @pytest.mark.nightly
    def test_conversations_with_tools_are_sampled_as_their_template_writes_them(
        self, backend: Backend, plain: Any
    ) -> None:
        check_tools(backend, plain, 12)

    @pytest.mark.nightly
    def test_the_official_client_chats_streams_and_scores(self, backend: Backend, plain: Any) -> None:
        pytest.importorskip("openai", reason="the official client is not installed")
        from helpers.serving_checks import check_answers

        check_answers(backend, plain)
