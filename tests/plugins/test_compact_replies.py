"""The compact decoder of scores makes the same results and errors of a body as the plain one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corelm.spec import Capabilities
from corelm_engine_kit import Decode, decoded
from helpers.canned_replies import answering
from helpers.requests import generation, scoring
from helpers.tiny_models import VOCAB, tiny_tokenizer
from vllm_backend import protocol_http as vllm
from vllm_backend import replies
from vllm_backend.capabilities_http import ServerInfo as VLLMInfo
from vllm_backend.server import VLLMServer

CAPABILITIES = Capabilities(vocab_size=VOCAB, max_context=64)
VLLM = VLLMInfo(
    capabilities=CAPABILITIES,
    tokenizer=tiny_tokenizer(),
    model="a-model",
    name="a-model",
    routes=frozenset(),
    fields=None,
)
IDS = [5, 17, 4, 9]

#: Returns a result of a reply, for one row.
Parse = Callable[[Any], Any]


def vllm_answer(reply: Any) -> Any:
    return answering(VLLMServer, VLLM, reply).generate(generation(max_new_tokens=len(IDS)))


def vllm_scores(reply: Any) -> Any:
    return answering(VLLMServer, VLLM, reply).score_logprobs(scoring([IDS]))


def vllm_answer_reply() -> Any:
    labels = [f"token_id:{token}" for token in IDS]
    values = [-0.5, -1.0, -2.5, -1e-7]
    top = [{label: value} for label, value in zip(labels, values, strict=True)]
    logprobs = {"text_offset": [0, 4, 8, 12], "token_logprobs": values, "tokens": labels, "top_logprobs": top}
    choice = {"index": 0, "text": " the the", "token_ids": [*IDS], "finish_reason": "length", "stop_reason": None}
    usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
    return {"id": "cmpl-a", "choices": [{**choice, "prompt_token_ids": [5], "logprobs": logprobs}], "usage": usage}


def vllm_scores_reply() -> Any:
    positions = [None, *({str(token): {"logprob": -1.5, "rank": 17, "decoded_token": None}} for token in IDS[1:-1])]
    label, last = f"token_id:{IDS[-1]}", IDS[-1:]
    logprobs = {"text_offset": [0], "token_logprobs": [-0.75], "tokens": [label], "top_logprobs": [{label: -0.75}]}
    choice = {"token_ids": last, "finish_reason": "length", "logprobs": logprobs, "prompt_logprobs": positions}
    return {"id": "cmpl-a", "choices": [choice]}


CASES: dict[str, tuple[Callable[[], Any], Parse]] = {
    "answer": (vllm_answer_reply, vllm_answer),
    "scores": (vllm_scores_reply, vllm_scores),
}

each_case = pytest.mark.parametrize("case", CASES)


def outcome(parse: Parse, decode: Decode, body: bytes) -> Any:
    """Return the numbers and the errors that come of a body, in a form that can be compared."""
    try:
        result = parse(decode(body))
    except (ValueError, RecursionError) as error:
        return type(error).__name__
    ids = result.ids.tolist() if hasattr(result, "ids") else result.scored.tolist()
    # A message may name the integer 5 as 5.0.
    errors = [
        re.sub(r" is (-?\d+), expected", lambda found: f" is {float(found[1])}, expected", error)
        for error in result.errors or ()
    ]
    rest = [getattr(result, name, None) for name in ("finish_reasons", "cached_tokens")]
    return ids, result.logprobs.tolist(), errors, rest


def check_same(case: str, body: bytes) -> Any:
    _, parse = CASES[case]
    found = outcome(parse, replies.decode, body)
    assert found == outcome(parse, decoded, body)
    return found


@each_case
def test_a_right_reply_has_the_same_result(case: str) -> None:
    for separators in ((",", ":"), (", ", ": "), (" ,\n", " : ")):
        body = json.dumps(CASES[case][0](), separators=separators).encode()
        _, logprobs, errors, (_, cached) = check_same(case, body)
        assert not errors and any(logprobs[0]) and cached == ((1,) if case == "answer" else None), separators


def test_right_scores_take_the_compact_form() -> None:
    scores = replies.decode(json.dumps(vllm_scores_reply()).encode())["choices"][0]
    assert isinstance(scores["prompt_logprobs"], replies.PromptLogprobs) and "text" not in scores


#: What a field of a reply may be by mistake.
ODD = [None, True, 0, -3, 5.0, 0.5, 2**63, -9999.5, math.nan, math.inf, "5", "token_id:05", "token_id:5", [], [[]], {}]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a reply."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


def changed(reply: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    part = reply
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return reply


@each_case
def test_any_value_in_any_place_has_the_same_outcome(case: str) -> None:
    make = CASES[case][0]
    outcomes = [
        check_same(case, json.dumps(changed(make(), path, value)).encode()) for path in places(make()) for value in ODD
    ]
    failed = [found for found in outcomes if found[2]]
    assert len(outcomes) > 200 and 50 < len(failed) < len(outcomes)


@each_case
def test_any_missing_value_has_the_same_outcome(case: str) -> None:
    make = CASES[case][0]
    for path in places(make())[1:]:
        reply = make()
        part = reply
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]
        check_same(case, json.dumps(reply).encode())


@each_case
@given(data=st.data())
def test_any_numbers_have_the_same_outcome(case: str, data: st.DataObject) -> None:
    numbers = st.floats(-12.0, 0.0) | st.floats(-12.0, 0.0, width=32) | st.integers(-5, 0) | st.floats()
    reply = CASES[case][0]()
    for path in places(reply):
        part = reply
        for key in path:
            part = part[key]
        if type(part) is float:
            changed(reply, path, data.draw(numbers))
    check_same(case, json.dumps(reply).encode())


NO_REPLIES = [b"", b" ", b"7", b"[]", b"{}", b"\xff", b'{"error": {"message": "no"}}', b"[" * 200_000]


@each_case
def test_a_body_that_is_no_reply_has_the_same_outcome(case: str) -> None:
    for body in (*NO_REPLIES, b'{"choices": [{}, {}]}'):
        check_same(case, body)


def test_two_candidates_at_one_position_and_none_at_the_next_are_not_taken_for_one_each() -> None:
    reply = vllm_scores_reply()
    positions = reply["choices"][0]["prompt_logprobs"]
    positions[1].update(positions[2])
    positions[2].clear()
    errors = check_same("scores", json.dumps(reply).encode())[2]
    assert "do not name id 4" in errors[0]


def test_the_most_probable_ids_are_decoded_plainly() -> None:
    payloads = [*vllm.scoring_requests(scoring([IDS], return_argmax=True), VLLM).values()]
    assert replies.decoder(payloads) is decoded
    assert replies.decoder([*vllm.scoring_requests(scoring([IDS]), VLLM).values()]) is replies.decode


@each_case
def test_an_id_beyond_64_bits_is_an_error_of_its_row(case: str) -> None:
    make, parse = CASES[case]
    body = json.dumps(make()).replace("17", str(2**70)).encode()
    results = [parse(way(body)) for way in (replies.decode, decoded)]
    # The words may differ: orjson makes a float of it.
    assert all(result.errors is not None and "does not fit the request" in result.errors[0] for result in results)
