"""`policy.stream` and `policy.astream`: text, ids and log-probs as they come, then what the policy returns."""

import asyncio

import torch
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy
from corelm.errors import InvalidRequestError
from helpers.each import each
from helpers.refusals import refused
from helpers.toy_prompts import QUESTIONS, chat

SAMPLING = {"max_new_tokens": 24, "temperature": 0.8}


def conversations(count: int = 3) -> TensorDict:
    return TensorDict(history=History.from_chats([chat(question) for question in QUESTIONS[:count]]))


def assert_equal(one: TensorDict, other: TensorDict) -> None:
    assert one["text"].response == other["text"].response
    assert corelm.ragged(one, ("tokens", "full")).tolist() == corelm.ragged(other, ("tokens", "full")).tolist()
    assert corelm.ragged(one, ("log_probs", "full")).tolist() == corelm.ragged(other, ("log_probs", "full")).tolist()
    assert list(one["finish_reason"]) == list(other["finish_reason"])


@each("batching", [False, True])
def test_the_result_is_what_the_policy_returns(backend, batching):
    policy = LLMPolicy(backend, sampling_params=SAMPLING, batching=batching)
    stream = policy.stream(conversations(), seed=7)
    chunks = list(stream)
    assert_equal(stream.result, policy(conversations(), seed=7))
    for row, text in enumerate(stream.result["text"].response):
        own = [chunk for chunk in chunks if chunk.row == row]
        assert "".join(chunk.text for chunk in own) == text and len(own) > 2
        assert [i for chunk in own for i in chunk.ids] == stream.result["tokens"].response[row].tolist()
        assert [v for chunk in own for v in chunk.logprobs] == stream.result["log_probs"].response[row].tolist()
        assert own[-1].finish_reason == stream.result["finish_reason"][row]
    policy.cleanup_batching()


def test_the_tensordict_is_written_when_the_stream_has_ended(backend):
    td = conversations(1)
    with LLMPolicy(backend, sampling_params=SAMPLING).stream(td, seed=7) as stream:
        next(stream)
        assert "text" not in td.keys()
        list(stream)
    assert stream.result is td and "text" in td.keys()


def test_a_stop_string_is_never_shown(backend):
    free = LLMPolicy(backend, sampling_params=SAMPLING)(conversations(), seed=7)["text"].response
    stop = [text[3:5] for text in free if len(text) > 6]
    policy = LLMPolicy(backend, sampling_params={**SAMPLING, "stop": stop})
    stream = policy.stream(conversations(), seed=7)
    chunks = list(stream)
    assert "stop" in stream.result["finish_reason"]
    for row, text in enumerate(stream.result["text"].response):
        assert "".join(chunk.text for chunk in chunks if chunk.row == row) == text
        assert not any(string in text for string in stop)


def test_an_asynchronous_stream_is_the_same(backend):
    policy = LLMPolicy(backend, sampling_params=SAMPLING)

    async def read():
        async with policy.astream(conversations(), seed=7) as stream:
            return [chunk async for chunk in stream], stream.result

    chunks, result = asyncio.run(read())
    expected = policy.stream(conversations(), seed=7)
    assert chunks == list(expected)
    assert_equal(result, expected.result)


def test_bad_rows_are_refused_at_once_or_skipped(backend):
    td = TensorDict(tokens=torch.tensor([[5, 6], [5, 10**6]]), batch_size=[2])
    policy = LLMPolicy(backend, input_mode="tokens", sampling_params=SAMPLING, inplace=False)
    with refused(InvalidRequestError, field="prompts", rows=(1,)):
        policy.stream(td)
    stream = policy.replace(on_error="skip").stream(td)
    assert [chunk.finish_reason for chunk in stream if chunk.row == 1] == ["error"]
    assert "vocabulary" in stream.result["errors"][1]
