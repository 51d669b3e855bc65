"""A real server: what probing finds, its limits, and the bad requests that must not end it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from corelm import Backend
from corelm.errors import CapabilityError, EngineError
from helpers import oracle
from helpers.capability_tables import assert_page_says
from helpers.silences import outlasts_silence
from helpers.tiny_models import CONTEXT, random_rows

# Probing and limits ---------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_probing_finds_generation_modes_and_seeds(shared: Backend, original: Backend, seeded: Backend):
    modes = [backend.capabilities.generation_modes for backend in (shared, original, seeded)]
    assert modes == [{"scaled"}, {"raw"}, {"scaled"}]
    assert [b.capabilities.per_answer_seeds for b in (shared, original, seeded)] == [False, False, True]
    assert [("min_p" in b.capabilities.sampling) for b in (shared, original, seeded)] == [True, True, False]


def test_rows_may_be_as_long_as_max_context(shared: Backend, original: Backend, model):
    # SGLang keeps 7 tokens of the context free. `original` was started with a context that is 7 tokens longer.
    for backend, context in ((shared, CONTEXT - 7), (original, CONTEXT)):
        assert backend.capabilities.max_context == context
        (row,) = random_rows(context)
        scores = backend.score_logprobs([row]).logprobs.values
        torch.testing.assert_close(scores, oracle.logprobs(model, row), atol=1e-4, rtol=0)
        for length in (1, 250, context - 1):
            batch = backend.generate([row[:length]], {"max_new_tokens": context - length, "ignore_eos": True})
            assert batch.ids.lengths.tolist() == [context - length]


# Bad requests ---------------------------------------------------------------------------------------------------------

GOOD = [5, 17, 300]


def test_numbers_too_large_for_the_scheduler_are_harmless(shared: Backend):
    batch = shared.generate([GOOD], {"max_new_tokens": 2, "top_k": 2**31 - 1, "ignore_eos": True}, logprobs="none")
    assert batch.ids.lengths.tolist() == [2]
    batch = shared.generate([GOOD], {"max_new_tokens": None, "min_new_tokens": 2**31 - 1}, logprobs="none")
    assert batch.ids.lengths.tolist() == [502]
    _check_alive(shared)


def test_unknown_engine_kwargs_are_refused_by_the_server(shared: Backend):
    with pytest.raises(EngineError, match="no_such_option"):
        shared.generate([GOOD], {"max_new_tokens": 2, "engine_kwargs": {"no_such_option": 1}}, logprobs="none")
    batch = shared.generate([GOOD], {"max_new_tokens": 4, "engine_kwargs": {"regex": "[ab]{3}"}}, logprobs="none")
    assert set(shared.detokenize(batch.ids)[0]) <= {"a", "b"}
    _check_alive(shared)


# Refused log-probs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        ({"temperature": 0.7}, "raw"),
        ({"temperature": 0.7, "top_p": 0.9}, "processed"),
        ({"presence_penalty": 1.0}, "raw"),
        ({"min_new_tokens": 2}, "raw"),
        ({"temperature": 0.7, "presence_penalty": 1.0}, "processed"),
    ],
)
def test_log_probs_that_are_neither_raw_nor_processed_are_refused(shared: Backend, sampling, mode):
    with pytest.raises(CapabilityError) as caught:
        shared.generate([GOOD], {"max_new_tokens": 2, **sampling}, logprobs=mode)
    assert caught.value.capability == "generation_modes"


def test_scores_at_another_temperature_are_refused(shared: Backend):
    with pytest.raises(CapabilityError):
        shared.score_logprobs([GOOD], temperature=0.7)


def _check_alive(backend: Backend) -> None:
    assert backend.health()
    batch = backend.generate([GOOD], {"max_new_tokens": 1}, logprobs="none")
    assert batch.ids.lengths.tolist() == [1]


@pytest.mark.nightly
def test_answers_may_take_more_than_twice_the_read_timeout(
    launch: Callable[..., Backend], connect: Callable[..., Backend]
) -> None:
    with launch() as launched:
        assert outlasts_silence(lambda seconds: connect(launched, read_timeout=seconds), tokens=CONTEXT - 16, rows=128)


def test_the_page_of_the_engines_says_what_sglang_declares(shared: Backend) -> None:
    assert_page_says("sglang", shared, besides=["weight_stream"])
