"""What an engine returned for one row is believed only if it can be the answer to that row."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest

from corelm.errors import EngineError, InvalidRequestError
from corelm.spec import RowFailure
from corelm_engine_kit import (
    ABORTED,
    AccessError,
    PartialReply,
    RowError,
    TransientError,
    checked_finish_reason,
    checked_ids,
    checked_logprobs,
    raise_if_none_was_served,
    row_outcome,
)


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
    assert checked_logprobs([], 0) == []
    for values in ([-1.0], None, "x"):
        with pytest.raises(RowError, match="2 tokens"):
            checked_logprobs(values, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5, -9999.0, -1e300])
def test_a_log_prob_in_an_array_is_refused_as_one_in_a_list(value: float) -> None:
    with pytest.raises(RowError) as in_list:
        checked_logprobs([-1.0, value, -2.0], 3)
    with pytest.raises(RowError) as in_array:
        checked_logprobs(array("d", [-1.0, value, -2.0]), 3)
    assert str(in_array.value) == str(in_list.value) and "position 1" in str(in_list.value)


def test_an_array_of_log_probs_is_kept() -> None:
    values = array("d", [0.0, -9998.0, 2.0**-10])
    assert checked_logprobs(values, 3) is values and len(checked_logprobs(array("d"), 0)) == 0
    for refused in (values, array("q", [0, -1])):
        with pytest.raises(RowError, match="2 tokens"):
            checked_logprobs(refused, 2)


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
        ({"given": "stop", "ended": True, "least": 3}, "at least 3"),
        ({"given": "abort"}, "not by this client"),
        ({"given": "repetition", "ended": True}, "'repetition'"),
        ({"given": None}, "None"),
        ({"given": ["stop"]}, "stop"),
    ],
)
def test_a_finish_reason_that_the_ids_contradict_is_refused(case: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        reason(**case)


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
