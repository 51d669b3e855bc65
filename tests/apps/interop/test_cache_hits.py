"""What an engine says of its prefix cache reaches its rows, and the figures, on every way through core."""

from __future__ import annotations

from dataclasses import replace

import pytest

from corelm import Backend, hookimpl
from corelm.batching import DynamicBatcher
from corelm.spec import GenerateRequest, GenerateResult
from corelm_interop import Timing
from helpers.fakes import SHORT, Fake


class Caching(Fake):
    """Says that all ids of a prompt but the last came from the cache; of a prompt of one id, says nothing."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        result = Fake.generate(self, request)
        known = [None if length == 1 else length - 1 for length in request.prompts.lengths.tolist()]
        return replace(result, cached_tokens=tuple(known))


def cached(timing: Timing) -> Backend:
    return Backend.from_plugin(Caching(), "caching", wrappers=[timing])


def test_hits_are_a_share_of_the_prompts_of_which_the_engine_says_so() -> None:
    timing = Timing()
    result = cached(timing).generate([[1, 3, 4, 5], [1], [3, 4]], {**SHORT, "num_samples": 2})
    assert result.cached_tokens == (3, 3, None, None, 1, 1)
    made = timing.summary().hooks["generate"]
    assert (made.cached_tokens, made.cache_hits) == (8, pytest.approx(8 / 12))
    assert "67% of them cached" in repr(timing.summary())


def test_rows_that_are_left_out_have_no_count() -> None:
    result = cached(Timing()).generate([[1, 3], [99], [1, 3, 4]], SHORT, on_error="skip")
    assert result.cached_tokens == (1, None, 2)


def test_a_shared_call_gives_each_its_own() -> None:
    with DynamicBatcher(cached(Timing())) as batcher:
        futures = [batcher.submit_generate([[3] * n, [1]], SHORT) for n in (2, 3, 4)]
        assert [future.result(10).cached_tokens for future in futures] == [(1, None), (2, None), (3, None)]


def test_answers_that_go_on_say_nothing_because_their_prompts_had_the_answers_in_them() -> None:
    backend = cached(Timing())
    part = backend.generate([[1, 3]], {"max_new_tokens": 2})
    assert backend.generate([[1, 3]], {"max_new_tokens": 4}, continue_from=part).cached_tokens is None
