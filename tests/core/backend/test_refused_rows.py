"""Rows that a plugin refuses are named as the caller knows them, however the request was made of the caller's rows."""

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
