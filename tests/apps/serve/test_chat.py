"""The official client, unchanged, chats with the toy and with a tiny model of transformers."""

from __future__ import annotations

import asyncio

import openai
import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import Backend, History, LLMPolicy
from corelm_serve import ServerThread
from helpers import oracle
from helpers.serving import CHAT, Seen, chat_ids, client_of, serving
from helpers.tiny_models import tiny_model, tiny_tokenizer

ASKED = {"model": "m", "messages": CHAT, "max_tokens": 24, "seed": 7, "temperature": 0.7}


def policy_texts(backend: Backend, samples: int) -> list[str]:
    options = {"max_new_tokens": 24, "temperature": 0.7}
    policy = LLMPolicy(backend, sampling_params=options, num_samples=samples)
    found = policy(TensorDict(history=History.from_chats([CHAT]), batch_size=[1]), seed=7)
    return found["text"].response[0]


def test_answers_are_those_of_a_policy_with_the_same_seed(server: ServerThread, backend: Backend) -> None:
    with client_of(server) as client:
        answer = client.chat.completions.create(**ASKED, n=3)
    assert [each.message.content for each in answer.choices] == list(policy_texts(backend, 3))
    assert [each.index for each in answer.choices] == [0, 1, 2]
    assert all(each.finish_reason in ("stop", "length") for each in answer.choices)
    assert answer.model == "m" and answer.object == "chat.completion"


@pytest.mark.parametrize("continues", [None, True])
def test_a_conversation_that_ends_with_the_assistant_is_answered_as_by_a_policy(
    server: ServerThread, backend: Backend, continues: bool | None
) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "I am"}]
    options = {"max_new_tokens": 24, "temperature": 0.7}
    policy = LLMPolicy(backend, sampling_params=options, continue_final_message=continues)
    expected = policy(TensorDict(history=History.from_chats([chat])), seed=7)["text"].response[0]
    more = {"continue_final_message": bool(continues), "add_generation_prompt": not continues}
    with client_of(server) as client:
        asked = {**ASKED, "messages": chat, "extra_body": more}
        assert client.chat.completions.create(**asked).choices[0].message.content == expected
        chunks = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_a_stream_says_what_the_answer_says(server: ServerThread) -> None:
    with client_of(server) as client:
        whole = client.chat.completions.create(**ASKED, n=2)
        stream = client.chat.completions.create(
            **ASKED, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        texts, reasons, roles, tokens, usage = ["", ""], [None, None], ["", ""], [0, 0], None
        for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            if not chunk.choices:
                usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == [each.message.content for each in whole.choices]
    assert reasons == [each.finish_reason for each in whole.choices]
    assert roles == ["assistant"] * 2
    assert usage == whole.usage and sum(tokens) == whole.usage.completion_tokens


def test_the_asynchronous_client_chats_and_streams(server: ServerThread) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**ASKED) for _ in range(8)))
            texts = {each.choices[0].message.content for each in answers}
            streamed = ""
            async for chunk in await client.chat.completions.create(**ASKED, stream=True):
                streamed += chunk.choices[0].delta.content or ""
        assert len(texts) == 1
        return texts.pop(), streamed

    whole, streamed = asyncio.run(ask())
    assert whole == streamed and whole


def test_log_probs_are_those_of_a_plain_forward(seen: Seen) -> None:
    model = tiny_model()
    with (
        corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer(), wrappers=[seen]) as backend,
        serving(backend, model_name="m") as server,
        client_of(server) as client,
    ):
        answer = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=3)
    ((prompt, ids),) = seen.answers
    assert list(prompt) == chat_ids(CHAT)
    expected = oracle.answer_logprobs(model, prompt, ids)
    found = answer.choices[0].logprobs.content
    torch.testing.assert_close(torch.tensor([each.logprob for each in found]), expected, rtol=0, atol=2e-5)
    table = oracle.next_logits(model, [*prompt, *ids])[len(prompt) - 1 : -1].log_softmax(-1)
    for entry, row in zip(found, table, strict=True):
        best = torch.tensor([each.logprob for each in entry.top_logprobs])
        torch.testing.assert_close(best, row.topk(3).values, rtol=0, atol=2e-5)
    said = b"".join(bytes(each.bytes) for each in found)
    assert said.decode(errors="replace").startswith(answer.choices[0].message.content.rstrip("\ufffd"))


def test_a_stream_with_the_most_probable_ids_says_the_same(server: ServerThread) -> None:
    asked = {**ASKED, "logprobs": True, "top_logprobs": 2}
    with client_of(server) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        parts = [part.choices[0] for part in client.chat.completions.create(**asked, stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert [entry.model_dump() for entry in entries] == [entry.model_dump() for entry in whole.logprobs.content]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_and_what_follows_it_are_not_said(toy_server: ServerThread, stream: bool) -> None:
    asked = {"model": "m", "messages": CHAT, "max_tokens": 200, "seed": 3}
    with client_of(toy_server) as client:
        free = client.chat.completions.create(**asked).choices[0].message.content
        stop = free[3:6]
        answer = client.chat.completions.create(**asked, stop=[stop, "never said"], stream=stream)
        if stream:
            parts = [each.choices[0] for each in answer]
            text, reason = "".join(each.delta.content or "" for each in parts), parts[-1].finish_reason
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text == free[: free.index(stop)] and reason == "stop"


def test_a_stop_string_that_is_a_special_token_is_read_as_its_id(toy_server: ServerThread) -> None:
    with client_of(toy_server) as client:
        asked = {"model": "m", "messages": CHAT, "max_tokens": 200, "seed": 3, "extra_body": {"ignore_eos": True}}
        free = client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs.content
        answer = client.chat.completions.create(**asked, logprobs=True, stop=["<|im_end|>", "never said"]).choices[0]
    tokens = [each.token for each in free]
    assert [each.token for each in answer.logprobs.content] == tokens[: tokens.index("<|im_end|>") + 1]
    assert answer.finish_reason == "stop" and "<|im_end|>" not in answer.message.content


def test_the_default_limit_fills_the_context(toy_server: ServerThread) -> None:
    with client_of(toy_server) as client:
        ban = {"ignore_eos": True}
        answer = client.chat.completions.create(model="m", messages=CHAT, extra_body=ban)
    assert answer.usage.total_tokens == 512 and answer.choices[0].finish_reason == "length"


def test_models_are_listed_and_one_is_served(toy_server: ServerThread) -> None:
    with client_of(toy_server) as client:
        assert [each.id for each in client.models.list()] == ["m"]
        assert client.models.retrieve("m").owned_by == "corelm"
        assert client.models.retrieve("m").to_dict()["max_model_len"] == 512
        with pytest.raises(openai.NotFoundError, match="does not exist; give 'm'"):
            client.chat.completions.create(**{**ASKED, "model": "gpt-5"})
