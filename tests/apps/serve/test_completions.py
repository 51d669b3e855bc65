"""The official client completes texts and ids, and scores prompts as evaluation harnesses do."""

from __future__ import annotations

import itertools

import pytest
import torch

import corelm
from corelm import Backend
from corelm_serve import ServerThread
from corelm_testing.toy import Bigram
from helpers.sentencepiece import WHOLE, WORDS, one_after_another, words_of_sentencepiece
from helpers.serving import Seen, client_of, http_of, serving

PROMPTS = ["The cat is", "Où est", "A small bird sings"]


def test_echo_scores_are_those_of_the_backend(server: ServerThread, backend: Backend) -> None:
    with client_of(server) as client:
        answer = client.completions.create(model="m", prompt=PROMPTS, max_tokens=0, echo=True, logprobs=1)
    rows = backend.tokenize(PROMPTS).ids.tolist()
    scores = backend.score_logprobs(rows, top_k=1)
    for choice, prompt, row, expected in zip(answer.choices, PROMPTS, rows, scores.logprobs.split(), strict=True):
        assert choice.text == prompt and len(choice.logprobs.tokens) == len(row)
        assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
        torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs[1:]), expected[1:], rtol=0, atol=1e-5)
        offsets = [*choice.logprobs.text_offset, len(prompt)]
        for token, (begin, end) in zip(choice.logprobs.tokens, itertools.pairwise(offsets), strict=True):
            assert prompt[begin:end] in (token, "") or token.startswith("bytes:") or "\ufffd" in token
    assert answer.usage.completion_tokens == 0 and answer.usage.prompt_tokens == sum(map(len, rows))


def test_the_most_probable_token_is_among_the_top_and_so_is_the_token_itself(
    server: ServerThread, backend: Backend
) -> None:
    # As lm-eval reads whether a token is greedy.
    with client_of(server) as client:
        (choice,) = client.completions.create(model="m", prompt=PROMPTS[0], max_tokens=0, echo=True, logprobs=1).choices
    row = backend.tokenize(PROMPTS[:1]).ids.tolist()
    best = backend.score_logprobs(row, return_argmax=True).argmax.tolist()[0]
    pairs = zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, row[0], best, strict=True)
    for token, top, given, most_probable in list(pairs)[1:]:
        assert token in top
        assert (max(top, key=top.__getitem__) == token) == (given == most_probable)


def test_tokens_are_named_by_their_ids_if_asked(server: ServerThread, backend: Backend) -> None:
    asked = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 5, "seed": 1, "logprobs": 1, "echo": True}
    rows = backend.tokenize(PROMPTS[:1]).ids.tolist()
    with client_of(server) as client:
        plain = client.completions.create(**asked).choices[0]
        named = client.completions.create(**asked, extra_body={"return_tokens_as_token_ids": True}).choices[0]
        chunks = client.completions.create(
            **{**asked, "logprobs": 0}, stream=True, extra_body={"return_tokens_as_token_ids": True}
        )
        streamed = [name for chunk in chunks if (found := chunk.choices[0].logprobs) for name in found.tokens]
    ids = [int(name.removeprefix("token_id:")) for name in named.logprobs.tokens]
    assert ids[: len(rows[0])] == rows[0] and streamed == named.logprobs.tokens
    assert backend.detokenize([ids], skip_special_tokens=True) == [named.text]
    assert (named.text, named.logprobs.token_logprobs, named.logprobs.text_offset) == (
        plain.text,
        plain.logprobs.token_logprobs,
        plain.logprobs.text_offset,
    )
    tops = zip(named.logprobs.tokens, named.logprobs.top_logprobs, strict=True)
    assert all(name in top for name, top in list(tops)[1:])


def test_echo_with_an_answer_has_the_log_probs_of_both(server: ServerThread, backend: Backend) -> None:
    asked = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 5, "seed": 1}
    with client_of(server) as client:
        (both,) = client.completions.create(**asked, echo=True, logprobs=1).choices
        (alone,) = client.completions.create(**asked, logprobs=1).choices
        (scored,) = client.completions.create(**{**asked, "max_tokens": 0}, echo=True, logprobs=1).choices
    assert both.text == PROMPTS[0] + alone.text
    assert both.logprobs.tokens == scored.logprobs.tokens + alone.logprobs.tokens
    assert both.logprobs.token_logprobs == scored.logprobs.token_logprobs + alone.logprobs.token_logprobs
    assert both.logprobs.text_offset[-len(alone.logprobs.tokens)] == len(PROMPTS[0])


def test_a_stream_says_what_the_completion_says(server: ServerThread) -> None:
    asked = {"model": "m", "prompt": PROMPTS, "max_tokens": 8, "seed": 1, "n": 2, "echo": True, "logprobs": 0}
    with client_of(server) as client:
        whole = client.completions.create(**asked).choices
        texts, tokens, reasons = [""] * 6, [[] for _ in range(6)], [None] * 6
        for part in client.completions.create(**asked, stream=True):
            (choice,) = part.choices
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [each.text for each in whole]
    assert tokens == [each.logprobs.tokens for each in whole]
    assert reasons == [each.finish_reason for each in whole]


def test_one_token_has_no_log_prob_to_score(server: ServerThread) -> None:
    with client_of(server) as client:
        (choice,) = client.completions.create(model="m", prompt=[5], max_tokens=0, echo=True, logprobs=1).choices
    assert choice.logprobs.token_logprobs == [None] and choice.logprobs.text_offset == [0]


@pytest.mark.parametrize("many", [False, True])
def test_ids_are_read_as_they_are(server: ServerThread, backend: Backend, seen: Seen, many: bool) -> None:
    row = backend.tokenize(PROMPTS[:1]).ids.tolist()[0]
    with client_of(server) as client:
        answer = client.completions.create(model="m", prompt=[row, row] if many else row, max_tokens=3, seed=2)
    assert {prompt for prompt, _ in seen.answers} == {tuple(row)}
    assert len(answer.choices) == 1 + many


def test_the_token_endpoint_answers_in_ids_with_log_probs_and_provenance(
    server: ServerThread, backend: Backend, seen: Seen
) -> None:
    rows = backend.tokenize(PROMPTS).ids.tolist()
    with http_of(server) as client:
        asked = {"prompt_token_ids": rows, "n": 2, "max_tokens": 6, "seed": 5, "top_logprobs": 2}
        found = client.post("/v1/tokens", json=asked).json()
    expected = backend.generate(rows, {"max_new_tokens": 6, "n": 2, "seed": 5}, top_logprobs=2)
    assert [each["token_ids"] for each in found["choices"]] == expected.ids.tolist()
    assert [each["prompt_index"] for each in found["choices"]] == [0, 0, 1, 1, 2, 2]
    for choice, logprobs, top in zip(
        found["choices"], expected.logprobs.tolist(), expected.top_ids.split(), strict=True
    ):
        torch.testing.assert_close(choice["logprobs"], logprobs, rtol=0, atol=1e-5)
        assert choice["top_ids"] == top.tolist()
        assert choice["provenance"]["mode"] == "raw" and choice["provenance"]["weight_version"] == "0"
    assert found["usage"]["prompt_tokens"] == sum(map(len, rows))


def test_the_token_endpoint_has_the_log_probs_of_the_server_unless_others_are_asked_for(tiny: Backend) -> None:
    asked = {"prompt_token_ids": [3, 7], "max_tokens": 5, "seed": 5, "temperature": 2.0}
    with serving(tiny, model_name="m", log_probs="processed") as server, http_of(server) as client:
        (own,), (raw,) = (
            client.post("/v1/tokens", json=body).json()["choices"] for body in (asked, {**asked, "logprobs": "raw"})
        )
        assert server.sessions is not None
        recorded = [node for name in server.sessions.ids() for node in server.sessions.get(name).nodes]
    sequence = torch.tensor([[3, 7, *own["token_ids"]]])
    for choice, temperature in ((own, 2.0), (raw, 1.0)):
        expected = tiny.score_logprobs(sequence, temperature=temperature).logprobs.tolist()[0][2:]
        assert choice["logprobs"] == pytest.approx(expected, abs=1e-5) and choice["token_ids"] == own["token_ids"]
    answers = [node for node in recorded if node.kind == "answer"]
    assert [node.provenance and node.provenance.mode for node in answers] == ["processed", "raw"]


def test_echo_returns_log_probs_of_one_distribution(tiny: Backend) -> None:
    asked = {
        "model": "m",
        "prompt": [3, 7, 9],
        "max_tokens": 4,
        "echo": True,
        "logprobs": 0,
        "temperature": 2.0,
        "seed": 5,
    }
    with serving(tiny, model_name="m", log_probs="processed") as server, http_of(server) as client:
        (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
        body = {"prompt_token_ids": [3, 7, 9], "max_tokens": 4, "temperature": 2.0, "seed": 5}
        (answer,) = client.post("/v1/tokens", json=body).json()["choices"]
    expected = tiny.score_logprobs([[3, 7, 9, *answer["token_ids"]]]).logprobs.tolist()[0]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected[1:], abs=1e-5)


def test_seeds_give_the_same_answers_again_and_others_do_not(toy_server: ServerThread) -> None:
    asked = {"model": "m", "prompt": "The", "max_tokens": 30}
    with client_of(toy_server) as client:
        texts = [client.completions.create(**asked, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_an_answer_is_decoded_after_its_prompt() -> None:
    tokenizer = words_of_sentencepiece()
    assert tokenizer.decode(range(2, len(WORDS) + 2)) == WHOLE and tokenizer.decode([3]) == "my"
    with (
        corelm.get_backend("toy", one_after_another(), tokenizer=tokenizer) as backend,
        serving(backend, model_name="m") as server,
        client_of(server) as client,
    ):
        asked = {"model": "m", "prompt": "Hello", "max_tokens": 9, "temperature": 0}
        (answer,) = client.completions.create(**asked, logprobs=1).choices
        (echoed,) = client.completions.create(**asked, logprobs=1, echo=True).choices
        chunks = list(client.completions.create(**asked, logprobs=0, stream=True))
        (stopped,) = client.completions.create(**asked, stop=[" my friend"]).choices
        (from_half,) = client.completions.create(**{**asked, "prompt": [2, 5]}, logprobs=0, echo=True).choices
    assert "Hello" + answer.text == echoed.text == WHOLE
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.text
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    # The answer completes the character that its prompt has begun.
    assert from_half.text == "Helloé." and from_half.logprobs.text_offset == [0, 5, 5, 6, 7]
    assert [at - len("Hello") for at in echoed.logprobs.text_offset[1:]] == answer.logprobs.text_offset
    streamed = [at for chunk in chunks if (made := chunk.choices[0].logprobs) for at in made.text_offset]
    assert streamed == answer.logprobs.text_offset == [0, 3, 10, 10, 11, 12]


def test_offsets_count_what_clients_see_of_bytes_that_form_no_character() -> None:
    # a, two bytes that begin characters, b, c
    said = [*b"a\xc3\xe2bc"]
    table = torch.zeros(260, 260)
    for token, following in itertools.pairwise([*b"x", *said]):
        table[token, following] = 50.0
    with (
        corelm.get_backend("toy", Bigram(table)) as backend,
        serving(backend, model_name="m") as server,
        client_of(server) as client,
    ):
        (choice,) = client.completions.create(
            model="m", prompt="x", max_tokens=len(said), temperature=0, logprobs=0
        ).choices
    assert choice.text == "a\ufffd\ufffdbc"
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
