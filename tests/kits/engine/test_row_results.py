"""Results of calls in which some rows were answered and others failed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from corelm import Ragged, SamplingParams
from corelm.spec import (
    GenerateRequest,
    Provenance,
    RowAnswer,
    RowFailure,
    RowScores,
    TopIds,
    generate_result,
    score_result,
)
from helpers.requests import generation, scoring


def asked(logprobs: Any = "raw", **given: Any) -> GenerateRequest:
    return generation([[5], [6, 7], [8]], logprobs, **given)


def rounded(rows: Ragged | None) -> list[list[float]]:
    assert rows is not None and rows.values.dtype == torch.float32
    return [[round(value, 4) for value in row] for row in rows.tolist()]


# Generating -----------------------------------------------------------------------------------------------------------


def test_answers_and_failures_keep_the_order_of_their_rows():
    rows = [RowAnswer([1, 2], [-0.5, -1.0], "stop"), RowFailure("too long"), RowAnswer([3], [-2.0], "length")]
    result = generate_result(asked(), rows)
    assert result.ids.tolist() == [[1, 2], [], [3]] and rounded(result.logprobs) == [[-0.5, -1.0], [], [-2.0]]
    assert result.finish_reasons == ("stop", "error", "length") and result.errors == ("", "too long", "")


def test_an_aborted_row_is_not_an_error():
    rows = [RowFailure("aborted", aborted=True)] * 2 + [RowAnswer([3], [-2.0], "abort")]
    result = generate_result(asked(), rows)
    assert result.ids.tolist() == [[], [], [3]] and result.errors is None
    assert result.finish_reasons == ("abort",) * 3


def test_without_log_probs_there_are_none_in_the_result():
    result = generate_result(asked("none"), [RowAnswer([1], [], "length")] * 3)
    assert result.logprobs is None and result.ids.tolist() == [[1]] * 3


def test_log_probs_are_labelled_with_their_distribution():
    cases: list[tuple[Any, dict[str, Any], Any]] = [
        ("raw", {"temperature": 0.5, "top_k": 3}, ("raw", 1.0, "full")),
        ("none", {"temperature": 0.5}, ("raw", 1.0, "full")),
        ("processed", {"temperature": 0.5}, ("processed", 0.5, "full")),
        ("processed", {"temperature": 0.0}, ("processed", 0.0, "full")),
        ("processed", {"presence_penalty": 1.0}, ("processed", 1.0, "full")),
        ("processed", {"top_p": 0.9}, ("processed", 1.0, "truncated")),
        ("processed", {"min_new_tokens": 2}, ("processed", 1.0, "truncated")),
        ("processed", {"engine_kwargs": {"logit_bias": {}}}, ("processed", 1.0, "truncated")),
    ]
    for logprobs, sampling, label in cases:
        assert tuple(Provenance.label(logprobs, SamplingParams(**sampling)).values()) == label, sampling
        result = generate_result(asked(logprobs, **sampling), [RowAnswer([1], [-1.0], "length")] * 3)
        assert (result.mode, result.temperature, result.support) == label, sampling


# Scoring --------------------------------------------------------------------------------------------------------------


def test_scores_stand_at_the_end_of_their_sequences():
    request = scoring([[5, 6, 7], [8, 9], [4, 4, 4, 4], [3]], [1, 1, 3, 1])
    result = score_result(request, {0: RowScores([-0.5, -2.0]), 1: RowFailure("too long"), 2: RowScores([-9.0, -1.0])})
    assert rounded(result.logprobs) == [[0, -0.5, -2], [0, 0], [0, 0, 0, -1], [0]]
    assert result.scored.tolist() == [[False, True, True], [False] * 2, [False, False, False, True], [False]]
    assert result.errors == ("", "too long", "", "") and (result.mode, result.temperature) == ("raw", 1.0)


def test_the_most_probable_ids_stand_where_the_scores_are():
    request = scoring([[5, 6, 7], [8, 9], [4, 4, 4, 4], [3]], [1, 1, 3, 1], return_argmax=True)
    found = {0: RowScores([-0.5, -2.0], [6, 2]), 1: RowFailure("too long"), 2: RowScores([-9.0, -1.0], [1, 4])}
    result = score_result(request, found)
    assert result.argmax is not None and result.argmax.values.dtype == torch.int64
    assert result.argmax.tolist() == [[-1, 6, 2], [-1, -1], [-1, -1, -1, 4], [-1]]
    assert score_result(scoring([[5, 6]], [1]), {0: RowScores([-0.5], [6])}).argmax is None


def test_a_row_without_its_most_probable_ids_is_an_error_of_that_row():
    request = scoring([[5, 6], [7, 8]], [1, 1], return_argmax=True)
    result = score_result(request, {0: RowScores([-0.5]), 1: RowScores([-1.0], [8])})
    assert result.errors == ("the engine returned 0 most probable ids for 1 log-probs", "")
    assert result.argmax is not None and result.argmax.tolist() == [[-1, -1], [-1, 8]]
    assert result.scored.tolist() == [[False, False], [False, True]]


def test_a_row_of_which_nothing_was_asked_is_not_scored():
    request = scoring([[5, 6], [7, 8], [9]], [2, 1, 0])
    result = score_result(request, {0: RowScores([]), 1: RowScores([-1.0]), 2: RowScores([-3.0])})
    assert rounded(result.logprobs) == [[0, 0], [0, -1], [0]] and result.errors is None
    assert result.scored.tolist() == [[False, False], [False, True], [False]]


def test_too_few_scores_for_a_row_are_an_error_of_that_row():
    result = score_result(scoring([[5, 6], [7, 8, 9]], [1, 1]), {0: RowScores([-1.0]), 1: RowScores([-1.0])})
    assert result.errors == ("", "the engine returned 1 log-probs, but 2 were asked for")
    assert result.scored.tolist() == [[False, True], [False] * 3]


def test_scores_at_another_temperature_are_processed_ones():
    result = score_result(scoring([[5, 6]], [1], temperature=2.0), {0: RowScores([-1.0])})
    assert (result.mode, result.temperature) == ("processed", 2.0)


def test_kept_ids_are_sorted_and_flat() -> None:
    rows = [
        RowAnswer([4, 2], [-0.1, -0.2], "stop", [[7, 4], [2]], [-0.3, 0.0]),
        RowFailure("broken"),
        RowFailure("broken"),
    ]
    result = generate_result(asked(return_support=True), rows)
    assert result.kept_ids.tolist() == [[[4, 7], [2]], [], []]
    assert result.kept_log_mass.lengths.tolist() == [2, 0, 0]


def test_an_answer_without_the_ids_that_were_asked_for_fails_alone() -> None:
    top = TopIds.of([{4: -0.5}], 2)
    rows = [
        RowAnswer([4], [-0.1], "abort", [[7, 4]], [-0.3], top),
        RowAnswer([4, 2], [-0.1, -0.2], "abort"),
        RowAnswer([], [], "abort"),
    ]
    result = generate_result(asked(return_support=True, top_logprobs=2), rows)
    assert result.ids.tolist() == [[4], [], []] and result.finish_reasons == ("abort", "error", "abort")
    assert result.errors == ("", "the engine returned the kept ids of 0 tokens, and 2 were sampled", "")
    assert result.kept_ids is not None and result.kept_ids.tolist() == [[[4, 7]], [], []]
    only_top = generate_result(asked(top_logprobs=2), [*rows[:2], replace(rows[1], top=top)])
    assert only_top.errors is not None and [bool(error) for error in only_top.errors] == [False, True, True]


def test_the_tail_is_what_the_top_ids_leave() -> None:
    top = TopIds.of([{4: math.log(0.5), 7: math.log(0.25), 9: math.log(0.125)}, {2: 0.0}], 2)
    rows = [RowAnswer([4, 2], [-0.1, -0.2], "stop", top=top), RowFailure("broken"), RowFailure("broken")]
    result = generate_result(asked(top_logprobs=2), rows)
    assert result.top_ids.values.tolist() == [[4, 7], [2, -1]]
    assert result.top_logprobs.values[1].tolist() == [0.0, -math.inf]
    assert result.tail_log_mass.values.tolist() == pytest.approx([math.log(0.25), -math.inf])
    assert result.top_ids.lengths.tolist() == [2, 0, 0]


def test_a_scored_row_without_all_of_its_top_ids_is_an_error_of_that_row() -> None:
    request = scoring([[1, 2, 3], [4, 5, 6]], [1, 1], top_k=1)
    whole, short = TopIds.of([{2: -0.5}, {3: -0.25}], 1), TopIds.of([{5: -0.5}], 1)
    result = score_result(request, {0: RowScores([-0.5, -0.25], top=whole), 1: RowScores([-0.5, -1.0], top=short)})
    assert result.errors == ("", "the engine returned the most probable ids of 1 tokens for 2 log-probs")
    assert result.top_ids.tolist() == [[[-1], [2], [3]], [[-1], [-1], [-1]]]
    assert result.top_logprobs.values.flatten().tolist() == [0.0, -0.5, -0.25, 0.0, 0.0, 0.0]


def test_what_an_engine_says_of_its_cache_is_kept_where_it_is_a_count():
    said = [RowAnswer([1], [-1.0], "length", cached_tokens=count) for count in (1, 99, True)]
    # A request that the engine has interrupted finds its own answer in the cache as well.
    assert generate_result(asked(), said).cached_tokens == (1, 2, None)
    assert generate_result(asked(), [said[0], RowFailure("too long"), said[2]]).cached_tokens == (1, None, None)
    for none in (None, "3", -1, 2.0):
        rows = [RowAnswer([1], [-1.0], "length", cached_tokens=none)] * 3
        assert generate_result(asked(), rows).cached_tokens is None
