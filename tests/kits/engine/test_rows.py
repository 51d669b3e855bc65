"""Results of calls in which some rows were answered and others failed."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from corelm.errors import EngineError, InvalidRequestError
from corelm.spec import (
    GenerateRequest,
    GenerateResult,
    Ragged,
    RowAnswer,
    RowFailure,
    RowScores,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    StopStrings,
    TokenSets,
    TopIds,
    generate_result,
    score_result,
)
from corelm_engine_kit import (
    ABORTED,
    AccessError,
    PartialReply,
    RowError,
    TransientError,
    checked_answer,
    checked_finish_reason,
    checked_ids,
    checked_logprobs,
    raise_if_none_was_served,
    row_outcome,
    wrong_kept_ids,
)
from helpers.requests import generation, scoring
from helpers.tiny_models import tiny_tokenizer


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
    result = generate_result(asked("processed", temperature=0.5, top_p=0.9), [RowAnswer([1], [-1.0], "length")] * 3)
    assert (result.mode, result.temperature, result.support) == ("processed", 0.5, "truncated")


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


# What is believed of one row ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [None, 7, "12", [1.0], ["1"], [True], [None], (1, 2), [-1], [9], [2**70], [1, 2, 3, 4]])
def test_ids_that_cannot_be_an_answer_are_refused(ids: Any) -> None:
    with pytest.raises(RowError):
        checked_ids(ids, vocab_size=9, limit=3)


def test_ids_are_kept() -> None:
    assert checked_ids([0, 8, 8], vocab_size=9, limit=3) == [0, 8, 8] and checked_ids([], vocab_size=9, limit=3) == []


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 0.5, 10**400, -(10**5000), -9999.0, -1e300, False, "-1.5", None, [], {}],
    ids=lambda value: type(value).__name__,
)
def test_a_log_prob_that_is_none_is_refused_with_its_position(value: Any) -> None:
    with pytest.raises(RowError, match="position 1"):
        checked_logprobs([-1.0, value, -2.0], 3)


def test_log_probs_become_floats() -> None:
    found = checked_logprobs([0, -1, -2.5, 2.0**-12], 4)
    assert found == [0.0, -1.0, -2.5, 2.0**-12] and {type(value) for value in found} == {float}
    assert checked_logprobs(array("d", [0.0, -9998.0, 2.0**-10]), 3) == [0.0, -9998.0, 2.0**-10]
    assert checked_logprobs([], 0) == []
    for values in ([-1.0], None, "x"):
        with pytest.raises(RowError, match="2 tokens"):
            checked_logprobs(values, 2)


def reason(
    given: Any, count: int = 2, *, limit: int = 3, least: int = 0, ended: bool = False, aborted: bool = False
) -> str:
    return checked_finish_reason(given, count, limit=limit, least=least, ended=ended, aborted=aborted, last=7)


def test_a_finish_reason_is_believed_if_the_ids_confirm_it() -> None:
    assert reason("length", 3) == "length" and reason("stop", ended=True) == "stop"
    assert reason("abort", 0, aborted=True) == "abort" and reason("length", 3, aborted=True) == "length"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"given": "length"}, "after 2 tokens, but 3"),
        ({"given": "length", "aborted": True}, "after 2 tokens"),
        ({"given": "stop"}, "stops at id 7"),
        ({"given": "stop", "ended": True, "least": 3}, "too early .id 7 after 2 tokens, but at least 3"),
        ({"given": "stop", "least": 3}, "it ends after 2 tokens, but at least 3"),
        ({"given": "abort"}, "not by this client"),
        ({"given": "repetition", "ended": True}, "'repetition'"),
        ({"given": None}, "None"),
        ({"given": ["stop"]}, "stop"),
    ],
)
def test_a_finish_reason_that_the_ids_contradict_is_refused(case: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        reason(**case)


@pytest.mark.parametrize("given", ["content_filter", "error", "repetition", None, 7, "abort"])
def test_a_token_that_ends_an_answer_excuses_no_reason_but_length_and_the_callers_abort(given: Any) -> None:
    def checked(reason: Any, aborted: bool = False, least: int = 0) -> RowAnswer:
        told = RowAnswer([5, 9, 6], [-1.0, -2.0, -3.0], reason)
        request = replace(asked(), stop_ids=frozenset({9}), sampling=SamplingParams(min_new_tokens=least))
        no_stops = StopStrings.of(SamplingParams(), tiny_tokenizer())
        return checked_answer(told, request, limit=3, stops=no_stops, vocab_size=100, aborted=aborted)

    expected = RowAnswer([5, 9], [-1.0, -2.0], "stop")
    assert checked("stop") == checked("length") == checked("abort", aborted=True) == expected
    with pytest.raises(RowError, match="not by this client" if given == "abort" else f"finish reason is {given!r}"):
        checked(given)
    with pytest.raises(RowError, match=r"too early \(id 9 after 2 tokens, but at least 3"):
        checked("length", least=3)


def test_what_an_answer_says_of_other_ids_is_cut_with_it() -> None:
    top = TopIds.of([{5: -0.5}, {9: -0.25}, {6: -1.0}], 1)
    told = RowAnswer([5, 9, 6], [-1.0, -2.0, -3.0], "length", [[5, 1], [9], [6]], [-0.1, -0.2, -0.3], top, 4)
    request = replace(asked(), stop_ids=frozenset({9}))
    no_stops = StopStrings.of(SamplingParams(), tiny_tokenizer())
    found = checked_answer(told, request, limit=3, stops=no_stops, vocab_size=100, aborted=False)
    assert (found.kept_ids, found.kept_log_mass, found.cached_tokens) == ([[5, 1], [9]], [-0.1, -0.2], 4)
    assert found.top is not None and [len(column) for column in found.top.columns] == [2, 2, 2]
    assert found.top.ids.tolist() == [[5], [9]]


def test_the_outcome_of_a_row_is_its_answer_or_why_there_is_none() -> None:
    assert row_outcome({"a": 1}, lambda reply, aborted: (reply["a"], aborted)) == (1, False)
    assert row_outcome(PartialReply({"a": 1}), lambda reply, aborted: (reply["a"], aborted)) == (1, True)
    assert row_outcome(ABORTED, lambda reply, aborted: reply) == RowFailure("the request was aborted", aborted=True)
    for error in (InvalidRequestError("too long"), EngineError("status 500")):
        assert row_outcome(error, lambda reply, aborted: reply) == RowFailure(str(error))


@pytest.mark.parametrize("reply", [None, 7, [], {}, {"a": {}}, {"a": []}, {"a": [10**400]}, "text"])
def test_a_reply_of_another_structure_is_a_failure_of_its_row(reply: Any) -> None:
    found = row_outcome(reply, lambda reply, aborted: float(reply["a"][0]))
    assert isinstance(found, RowFailure) and "does not fit the request" in found.why


BUSY, AWAY = TransientError("429", status=429), TransientError("503", status=503)
STEP, BROKEN = TransientError("500", status=500), TransientError("broken connection")
REFUSED, BARRED = InvalidRequestError("400"), AccessError("401")


@pytest.mark.parametrize(
    ("entries", "first"),
    [
        ([BUSY], BUSY),
        ([AWAY, BUSY], AWAY),
        ([REFUSED, BUSY], BUSY),
        ([STEP, BARRED, BUSY], BARRED),
        # A row that makes the server fail each time, next to rows that were turned away meanwhile.
        ([BUSY, STEP], None),
        ([BROKEN], None),
        ([REFUSED], None),
        ([BUSY, {"an": "answer"}], None),
        ([BUSY, ABORTED], None),
    ],
)
def test_a_call_fails_if_no_failure_says_anything_about_its_row(entries: list[Any], first: EngineError | None) -> None:
    if first is None:
        raise_if_none_was_served(entries, lambda: True)
        return
    with pytest.raises(EngineError) as caught:
        raise_if_none_was_served(entries, lambda: True)
    assert str(caught.value) == str(first) and type(caught.value) in (EngineError, AccessError)


# Kept ids: believed only if they are those that the scores imply ------------------------------------------------------


LOGPROBS = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.05, 0.05, 0.05]).log()


def generate(request: GenerateRequest) -> GenerateResult:
    """The answers of a model whose distribution is always the same."""
    assert request.return_support and request.sampling.top_k == 5
    ids = Ragged.from_list([[0, 1, 2, 3]] * 2)
    sets = TokenSets.from_list([[[0, 1, 2, 3, 4]] * 4] * 2)
    mass = ids.with_values(torch.full((8,), float(LOGPROBS[:5].logsumexp(0))))
    return GenerateResult(ids=ids, logprobs=None, finish_reasons=("length",) * 2, kept_ids=sets, kept_log_mass=mass)


def score(request: ScoreRequest) -> ScoreResult:
    rows = request.sequences
    scored = rows.with_values(torch.tensor([t >= s for n, s in zip([7, 5], [3, 1], strict=True) for t in range(n)]))
    top = LOGPROBS[:5].repeat(12, 1)
    return ScoreResult(
        logprobs=rows.with_values(torch.zeros(12)), scored=scored, top_logprobs=Ragged(top, rows.lengths)
    )


Spoil = Callable[[GenerateResult], GenerateResult]

SPOILS: dict[str, tuple[Spoil, str]] = {
    "failed": (lambda made: replace(made, errors=("it burns", "")), "it burns"),
    "another-mass": (lambda made: replace(made, kept_log_mass=made.ids.with_values(torch.full((8,), -0.9))), "scores"),
    "nan": (lambda made: replace(made, kept_log_mass=made.ids.with_values(torch.full((8,), torch.nan))), "scores"),
    "more": (
        lambda made: replace(made, kept_ids=TokenSets.from_list([[[0, 1, 2, 3, 4, 5]] * 4] * 2)),
        "ids instead of 5",
    ),
    "fewer": (lambda made: replace(made, kept_ids=TokenSets.from_list([[[0, 1, 2, 3]] * 4] * 2)), "ids instead of 5"),
    "not-the-token": (
        lambda made: replace(made, kept_ids=TokenSets.from_list([[[0, 1, 2, 4, 5]] * 4] * 2)),
        "not in its set",
    ),
}


def test_an_engine_is_believed_whose_sets_are_those_that_its_scores_imply() -> None:
    assert wrong_kept_ids(generate, score, 7) == ""


@pytest.mark.parametrize("name", SPOILS)
def test_an_engine_with_other_sets_is_not_believed(name: str) -> None:
    spoil, message = SPOILS[name]
    assert message in wrong_kept_ids(lambda request: spoil(generate(request)), score, 7)
