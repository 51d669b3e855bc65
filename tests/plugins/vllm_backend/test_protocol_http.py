"""The HTTP protocol: right replies become results, and a reply that does not fit its request is never reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from corelm.errors import CapabilityError, EngineError
from corelm.spec import Capabilities
from helpers.canned_replies import answering
from helpers.each import case
from helpers.fake_vllm import PROMPTS, SAMPLING, Connect, FakeVLLM, Spoil, next_logprobs
from helpers.half_characters import Pieces
from helpers.http_server import FaultServer, json_reply
from helpers.requests import generation
from vllm_backend.capabilities_http import ServerInfo
from vllm_backend.server import VLLMServer


def likeliest(*starts: list[int]) -> list[int]:
    """Return the most probable id after each of `starts`."""
    return [int(torch.tensor(next_logprobs(start)).argmax()) for start in starts]


# Right replies --------------------------------------------------------------------------------------------------------


def test_log_probs_and_scores_are_the_models(connect: Connect) -> None:
    backend = connect()
    result = backend.generate(PROMPTS, SAMPLING)
    assert result.finish_reasons == ("length",) * 3 and result.logprobs is not None
    rows = [prompt + answer for prompt, answer in zip(PROMPTS, result.ids.tolist(), strict=True)]
    whole = backend.score_logprobs(rows).logprobs.split()
    answers = backend.score_logprobs(rows, score_from=[len(prompt) for prompt in PROMPTS]).logprobs.split()
    for number, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
        expected = torch.tensor([0.0, *(next_logprobs(row[:t])[row[t]] for t in range(1, len(row)))])
        assert torch.equal(whole[number], expected)
        assert torch.equal(result.logprobs.split()[number], expected[len(prompt) :])
        assert torch.equal(answers[number][len(prompt) :], expected[len(prompt) :])
        assert not answers[number][: len(prompt)].any()


def test_the_most_probable_ids_come_with_the_scores(connect: Connect, server: FaultServer) -> None:
    backend = connect()
    rows = [[5, 17, 300, 2], [8, 9], [40], [7, *likeliest([7], [7, 0])], [6] * (backend.capabilities.max_context or 0)]
    starts = [1, 1, 1, 2, 60]
    before = len(server.requests)
    result = backend.score_logprobs(rows, score_from=starts, return_argmax=True)
    assert result.argmax is not None
    assert [request.body.get("prompt_logprobs") for request in server.requests[before:]].count(1) == 2
    for row, start, found in zip(rows, starts, result.argmax.tolist(), strict=True):
        assert found == [-1] * min(start, len(row)) + likeliest(*(row[:t] for t in range(start, len(row))))


def test_a_row_with_nothing_to_score_is_not_sent(connect: Connect, server: FaultServer) -> None:
    backend = connect()
    before = len(server.requests)
    assert backend.score_logprobs([[7]]).scored.tolist() == [[False]]
    assert len(server.requests) == before


def test_min_new_tokens_with_ignore_eos_is_refused_if_something_else_can_end_the_answer(
    connect: Connect, server: FaultServer
) -> None:
    backend = connect()
    with pytest.raises(CapabilityError):
        backend.generate(PROMPTS, SAMPLING | {"min_new_tokens": 2, "stop_token_ids": [9]}, logprobs="none")
    backend.generate(PROMPTS[:1], SAMPLING | {"min_new_tokens": 2}, logprobs="none")
    assert server.requests[-1].body["min_tokens"] == 0


def test_a_scoring_request_that_the_server_aborts_fails_alone(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect()
    fake.spoil = only(PROMPTS[1], put(finish_reason="abort", token_ids=[], logprobs=None))
    result = backend.score_logprobs([[*prompt, 3] for prompt in PROMPTS], on_error="skip")
    assert result.errors is not None and [bool(error) for error in result.errors] == [False, True, False]
    assert result.errors[1] == "the request was aborted"


# Replies that do not fit ----------------------------------------------------------------------------------------------


def drop(name: str) -> Spoil:
    return lambda choice: choice.pop(name)


def put(**values: Any) -> Spoil:
    return lambda choice: choice.update(values)


def only(prompt: list[int], spoil: Spoil) -> Spoil:
    """Spoil the choices for that prompt and no others."""
    return lambda choice: spoil(choice) if choice["prompt_token_ids"] == prompt else None


def in_logprobs(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda choice: change(choice["logprobs"])


WRONG_ANSWERS: dict[str, tuple[Spoil, str]] = {
    "no-ids": (drop("token_ids"), "no token_ids"),
    "ids-are-texts": (put(token_ids=["a"]), "not a list of integers"),
    "ids-outside-the-vocabulary": (put(token_ids=[7, 600, 7, 7]), "600"),
    "negative-ids": (put(token_ids=[7, -1, 7, 7]), "-1"),
    "another-prompt": (put(prompt_token_ids=[1, 2]), "another prompt"),
    "too-many-ids": (put(token_ids=[7] * 5), "at most 4"),
    "too-few-ids": (lambda choice: choice["token_ids"].pop(), "after 3 tokens"),
    "stop-without-a-stop-id": (put(finish_reason="stop"), "not a stop id"),
    "stop-string-of-the-prompt": (put(finish_reason="stop", stop_reason="x"), "end the prompt with a whole character"),
    "no-finish-reason": (put(finish_reason=None), "finish reason"),
    "no-log-probs": (put(logprobs=None), "no log-probs"),
    "log-probs-of-other-ids": (in_logprobs(lambda found: found["tokens"].reverse()), "not labelled"),
    "too-few-log-probs": (in_logprobs(lambda found: found["token_logprobs"].pop()), "one log-prob for each"),
    "null-log-probs": (in_logprobs(lambda found: found.update(token_logprobs=[None] * 4)), "position 0 is None"),
    "abort-nobody-asked-for": (put(finish_reason="abort"), "not by this client"),
    "repetition-nobody-asked-for": (put(finish_reason="repetition"), "'repetition'"),
}


def test_a_wrong_answer_is_an_engine_error(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect()
    for fault in WRONG_ANSWERS:
        with case(fault):
            fake.spoil, message = WRONG_ANSWERS[fault]
            with pytest.raises(EngineError, match=message):
                backend.generate(PROMPTS, SAMPLING)
            fake.spoil = only(PROMPTS[1], fake.spoil)
            result = backend.generate(PROMPTS, SAMPLING, on_error="skip")
            assert result.finish_reasons == ("length", "error", "length") and result.ids.lengths.tolist() == [4, 0, 4]
            fake.spoil = put()
            assert backend.generate(PROMPTS, SAMPLING).ids.lengths.tolist() == [4, 4, 4]


def name_another_id(choice: dict[str, Any]) -> None:
    choice["prompt_logprobs"][-1] = {"3": {"logprob": -1.0}}


WRONG_SCORES: dict[str, tuple[Spoil, str]] = {
    "no-log-probs": (drop("prompt_logprobs"), "prompt_logprobs"),
    "too-few-log-probs": (lambda choice: choice["prompt_logprobs"].pop(), "for every token"),
    "log-prob-of-another-id": (name_another_id, "do not name id"),
    "no-log-prob-of-the-last-id": (in_logprobs(lambda found: found.update(tokens=["token_id:3"])), "not labelled"),
    "another-prompt": (put(prompt_token_ids=[1, 2]), "another prompt"),
}


def keep_own_ids(choice: dict[str, Any]) -> None:
    """Reply as a server that does not return more candidates than the prompt's own ids."""
    choice["prompt_logprobs"][1:] = [dict([next(iter(each.items()))]) for each in choice["prompt_logprobs"][1:]]


def drop_ranks(choice: dict[str, Any]) -> None:
    for candidates in choice["prompt_logprobs"][1:]:
        for candidate in candidates.values():
            del candidate["rank"]


def candidates(own: float, best: int, of_best: float) -> Spoil:
    """Name `best` as the most probable id where the prompt has id 17, whose log-prob is `own`."""
    found = {"17": {"logprob": own, "rank": 2}, str(best): {"logprob": of_best, "rank": 1}}
    return lambda choice: choice["prompt_logprobs"].__setitem__(1, found)


WRONG_ARGMAX: dict[str, tuple[Spoil, str]] = {
    "no-candidates": (keep_own_ids, "leave out return_argmax=True"),
    "no-ranks": (drop_ranks, "leave out return_argmax=True"),
    "less-probable": (candidates(-4.0, 3, -50.0), "lack the most probable ids"),
    "outside-the-vocabulary": (candidates(-4.0, 600, -1.0), "outside the vocabulary"),
    "no-sampled-token": (put(token_ids=[]), "it samples .. where logit_bias makes id 2 more probable"),
    "another-is-sampled": (put(token_ids=[3]), "it samples .3. where logit_bias makes id 2 more probable"),
    "another-log-prob-of-the-sampled-one": (
        in_logprobs(lambda found: found["top_logprobs"][0].update({"token_id:2": -0.001})),
        "names id 2 with the log-prob -0.001 .* at position 2, but id 2 has -",
    ),
}


def test_an_id_that_is_not_the_most_probable_one_is_an_engine_error(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect()
    for fault in WRONG_ARGMAX:
        with case(fault):
            fake.spoil, message = WRONG_ARGMAX[fault]
            with pytest.raises(EngineError, match=message):
                backend.score_logprobs([[5, 17, 300, 2]], return_argmax=True)


def test_a_server_that_returns_no_candidates_fails_each_row_with_its_reason(connect: Connect, fake: FakeVLLM) -> None:
    """vLLM started with ``--max-logprobs 0``."""
    backend = connect(logprobs_mode="raw")
    reason = "Requested prompt logprobs of 1, which is greater than max allowed: 0"
    refused = json_reply({"error": {"message": reason, "type": "BadRequestError", "code": 400}}, 400)
    fake.fault = lambda request: refused if request.body and request.body.get("prompt_logprobs") else None
    with pytest.raises(EngineError, match=reason):
        backend.score_logprobs([[5, 17, 300, 2]], return_argmax=True)
    assert backend.score_logprobs([[5, 17, 300, 2]]).errors is None


def test_a_wrong_score_is_an_engine_error(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect()
    for fault in WRONG_SCORES:
        with case(fault):
            fake.spoil, message = WRONG_SCORES[fault]
            with pytest.raises(EngineError, match=message):
                backend.score_logprobs([[5, 17, 300, 2]])


def test_the_answer_to_another_request_is_never_reported(connect: Connect, server: FaultServer, fake: FakeVLLM) -> None:
    backend = connect(max_retries=1)
    expected = backend.generate([[5]], SAMPLING | {"temperature": 0.0})
    # The answer to a request that was sent with other parameters, from a server that does not echo prompts.
    choice = {"finish_reason": "length", "token_ids": [7] * 4, "logprobs": None}
    choice["logprobs"] = {"tokens": ["token_id:7"] * 4, "token_logprobs": [-1.0] * 4}
    another = json_reply({"id": "cmpl-of-another-request", "choices": [choice]})
    fake.fault = lambda request: another if request.path == "/v1/completions" else None
    for call in (
        lambda: backend.generate([[5]], SAMPLING),
        lambda: backend.score_logprobs([[5, 6]]),
    ):
        with pytest.raises(EngineError, match="does not name this request"):
            call()
    fake.fault = lambda request: None
    server.first.append(another)
    before = len(server.requests)
    assert backend.generate([[5]], SAMPLING | {"temperature": 0.0}).ids.tolist() == expected.ids.tolist()
    assert server.paths()[before:] == ["/v1/completions"] * 2


def test_ignored_stop_ids_and_stop_strings_are_noticed(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect()
    (unstopped,) = backend.generate(PROMPTS[:1], SAMPLING).ids.tolist()
    fake.ignored = {"stop_token_ids", "stop"}
    with pytest.raises(EngineError, match=f"stop id {unstopped[1]}"):
        backend.generate(PROMPTS[:1], SAMPLING | {"stop_token_ids": [unstopped[1]]})
    text = backend.detokenize([unstopped[:2]])[0]
    with pytest.raises(EngineError):
        backend.generate(PROMPTS[:1], SAMPLING | {"stop": [text]})
    fake.ignored = set()
    assert backend.generate(PROMPTS[:1], SAMPLING | {"stop": [text]}).finish_reasons == ("stop",)
    stopped = backend.generate(PROMPTS[:1], SAMPLING | {"stop_token_ids": [unstopped[1]]})
    assert stopped.ids.tolist() == [unstopped[:2]]


def test_an_answer_that_goes_on_to_complete_a_character_ends_at_its_stop_string() -> None:
    for ids, answer in [
        # vLLM holds back the text of token 1, which ends in half a character, and so finds the "x" a token later.
        ([0, 1, 2], [0, 1]),
        ([0, 3, 2], None),
        ([0, 3], [0, 3]),
    ]:
        with case(ids, answer):
            request = generation([[0]], "none", max_new_tokens=9, stop=("x",))
            info = ServerInfo(
                capabilities=Capabilities(vocab_size=4, max_context=64),
                tokenizer=Pieces(),
                model="a-model",
                name="a-model",
                routes=frozenset(),
                fields=None,
            )
            reply = {"choices": [{"finish_reason": "stop", "stop_reason": "x", "token_ids": ids}]}
            result = answering(VLLMServer, info, reply).generate(request)
            assert result.finish_reasons == ("error" if answer is None else "stop",) and result.ids.tolist() == [
                answer or []
            ]


def test_an_ignored_min_new_tokens_is_noticed(connect: Connect, fake: FakeVLLM) -> None:
    backend = connect()
    (unstopped,) = backend.generate(PROMPTS[:1], SAMPLING).ids.tolist()
    fake.ignored = {"min_tokens"}
    sampling = {"max_new_tokens": 4, "seed": 1, "min_new_tokens": 3, "stop_token_ids": [unstopped[1]]}
    with pytest.raises(EngineError):
        backend.generate(PROMPTS[:1], sampling, logprobs="none")
