"""Rows that a plugin refuses are named as the caller knows them, however the request was made of the caller's rows."""

from __future__ import annotations

import pytest

from corelm import DynamicBatcher
from corelm.errors import EngineError, InvalidRequestError, spelled_out
from helpers.each import each
from helpers.fakes import SHORT, fake
from helpers.refusals import refused


def refuses(*rows, error=InvalidRequestError):
    """Return a `bend` that refuses these rows of the request."""
    problems = {row: f"number {row}" for row in rows}

    def bend(batch):
        raise error(f"prompts: {spelled_out(problems)}", problems=problems)

    return bend


@each("error", [InvalidRequestError, EngineError])
@each("batched", [False, True])
def test_rows_that_a_plugin_refuses_are_named_as_the_caller_knows_them(batched, error):
    backend = fake(refuses(4, 5, 6, 7, error=error))
    with DynamicBatcher(backend) if batched else backend as asked, pytest.raises(error) as caught:
        asked.generate([[1], [3]], {**SHORT, "num_samples": 4})
    assert caught.value.rows == (1,) and str(caught.value) == "prompts: row 1: number 4"


def test_rows_that_a_plugin_refuses_are_counted_among_the_skipped_ones():
    backend = fake(refuses(1))
    with refused(InvalidRequestError, rows=(2,)) as caught:
        backend.generate([[1], [99], [3]], SHORT, on_error="skip")
    assert caught.value.problems == {2: "number 1"}
    with refused(InvalidRequestError, rows=(3,)) as caught:
        backend.score_logprobs([[], [1, 2], [99], [3, 4]], on_error="skip")
    assert caught.value.problems == {3: "number 1"}
    out = backend.generate([[99], [99]], SHORT, on_error="skip")
    assert out.finish_reasons == ("error", "error"), "no row is left for the engine"


def test_an_error_that_a_plugin_raises_again_and_again_is_renumbered_each_time():
    error = InvalidRequestError("max_new_tokens: row 1: too many", problems={1: "too many"})

    def bend(batch):
        raise error

    for _ in range(2):
        with refused(InvalidRequestError, rows=(2,)):
            fake(bend).generate([[99], [1], [3]], SHORT, on_error="skip")
    assert error.problems == {1: "too many"}


def test_rows_that_are_not_in_the_request_are_left_as_they_are():
    with pytest.raises(InvalidRequestError) as caught:
        fake(refuses(7)).generate([[99], [1]], SHORT, on_error="skip")
    assert caught.value.rows == (7,)


def test_a_message_that_names_rows_in_its_own_words_is_kept_beside_the_callers_rows():
    def bend(batch):
        raise EngineError("the server at port 9 lost request 1 of 2", problems={1: "lost"})

    with refused(EngineError, rows=(2,)) as caught:
        fake(bend).generate([[99], [1], [3]], SHORT, on_error="skip")
    assert "row 2: lost" in str(caught.value) and "the server at port 9 lost request 1 of 2" in str(caught.value)
