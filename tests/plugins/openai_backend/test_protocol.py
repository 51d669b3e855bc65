"""Ids for names and texts, texts for ids, and replies of any form: a row fails, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corelm.spec import Capabilities, GenerateRequest
from corelm_engine_kit import RowError
from helpers.canned_replies import answering
from helpers.letters import EOS, bos_tokenizer, letter_tokenizer, letters
from helpers.requests import generation, scoring
from helpers.tiny_models import VOCAB, tiny_tokenizer
from openai_backend import OpenAIBackend
from openai_backend.protocol import generation_requests
from openai_backend.server_info import ServerInfo
from openai_backend.vocabulary import Vocabulary

CAPABILITIES = Capabilities(
    vocab_size=VOCAB,
    max_context=64,
    eos_token_ids=frozenset({EOS}),
    generation_modes=frozenset({"raw"}),
    score=True,
    sampling={"temperature": None, "stop": None},
)
INFO: dict[str, Any] = {"samples": True, "logprobs": "raw", "takes_ids": True, "counts_prompts": True, "echo": 0}


def server(**known: Any) -> ServerInfo:
    return ServerInfo(CAPABILITIES, tiny_tokenizer(), "a-model", "/health", {"model": "a-model"}, **(INFO | known))


def request(logprobs: str, *prompts: list[int], **sampling: Any) -> GenerateRequest:
    return generation(prompts, logprobs, **{"max_new_tokens": 3, **sampling}, stop_ids=frozenset({EOS}))


# Replies --------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
LOGPROBS = st.fixed_dictionaries(
    {},
    optional={
        "tokens": st.lists(st.text(max_size=3) | st.just("token_id:5") | JSON, max_size=4) | JSON,
        "token_logprobs": st.lists(st.floats(-5, 0) | JSON, max_size=4) | JSON,
        "top_logprobs": JSON,
        "content": st.lists(st.dictionaries(st.sampled_from(["id", "token", "logprob"]), JSON), max_size=4) | JSON,
    },
)
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(max_size=5) | JSON,
        "token_ids": st.lists(st.integers(-1, VOCAB), max_size=4) | JSON,
        "prompt_token_ids": JSON,
        "finish_reason": st.sampled_from(["stop", "length", "abort", None]) | JSON,
        "logprobs": LOGPROBS | JSON,
    },
)
REPLY = (
    st.fixed_dictionaries({"choices": st.lists(CHOICE, min_size=1, max_size=1) | JSON}, optional={"usage": JSON}) | JSON
)
KINDS = [{"states_ids": True, "naming": "id"}, {"naming": "text"}, {"naming": "entry"}, {"naming": "id"}, {}]


@given(known=st.sampled_from(KINDS), reply=REPLY)
def test_a_reply_of_any_form_is_an_answer_or_fails_its_row(known, reply):
    for logprobs in ("raw", "none") if known else ("none",):
        asked = request(logprobs, [5, 6])
        info = server(**known)
        batch = answering(OpenAIBackend, info, reply).generate(asked)
        assert (batch.finish_reasons == ("error",)) == bool(batch.errors)
        assert batch.errors or batch.logprobs is None or batch.logprobs.lengths.equal(batch.ids.lengths)


@given(reply=REPLY)
def test_a_score_of_any_form_is_a_score_or_fails_its_row(reply):
    asked = scoring([[5, 6, 7]])
    info = server(naming="id")
    batch = answering(OpenAIBackend, info, reply).score_logprobs(asked)
    assert bool(batch.errors) != bool(batch.scored.values.any())


def test_a_stop_string_that_may_be_a_piece_of_a_special_token_is_not_left_to_the_server():
    # SGLang looks for stop strings in a text that has the special tokens, <|im_end|> for example.
    info = server(states_ids=True, stops_at_strings=True)
    (payload,) = generation_requests(request("none", [5, 6], stop=("e", "d|", " Q", "5")), info).values()
    assert payload["stop"] == [" Q", "5"]
    (payload,) = generation_requests(request("none", [5, 6], stop=("e",)), info).values()
    assert "stop" not in payload
    (ids,) = (tiny_tokenizer()("the sea")["input_ids"],)
    reply = {"choices": [{"token_ids": ids, "text": "the sea", "finish_reason": "length"}], "usage": {}}
    asked = request("none", [5, 6], stop=("e",), max_new_tokens=len(ids))
    batch = answering(OpenAIBackend, info, reply).generate(asked)
    assert batch.finish_reasons == ("stop",) and "e" in tiny_tokenizer().decode(batch.ids.values.tolist())
    assert "e" not in tiny_tokenizer().decode(batch.ids.values.tolist()[:-1])
    # The server went on, which no reason but the length explains.
    for reason in ("content_filter", "error", "abort", None, 7):
        cut = {**reply, "choices": [{**reply["choices"][0], "finish_reason": reason}]}
        batch = answering(OpenAIBackend, info, cut).generate(asked)
        assert batch.finish_reasons == ("error",) and batch.errors is not None
        assert ("aborted" if reason == "abort" else f"finish reason is {reason!r}") in batch.errors[0]


def test_a_text_whose_sampled_tokens_are_not_counted_fails_its_row():
    asked = request("none", [5, 6], max_new_tokens=len(tiny_tokenizer()("the sea")["input_ids"]))
    reply = {"choices": [{"text": "the sea", "finish_reason": "length"}]}
    counted = {**reply, "usage": {"completion_tokens": asked.sampling.max_new_tokens}}
    for sent, fails in ((counted, False), (reply, True), ({**reply, "usage": None}, True)):
        batch = answering(OpenAIBackend, server(), sent).generate(asked)
        assert bool(batch.errors) == fails
        assert not fails or "does not count the tokens" in batch.errors[0]


# Texts and names ------------------------------------------------------------------------------------------------------


@given(st.text(alphabet="ab e<>|imendst\n é猫", max_size=12))
def test_a_text_stands_for_the_ids_that_it_is_encoded_to(text):
    vocabulary = Vocabulary(tiny_tokenizer(), VOCAB)
    ids = vocabulary.encode(text)
    assert vocabulary.prompt_text(ids, adds_special_tokens=False) == text


@given(st.lists(st.integers(0, VOCAB - 1), max_size=8))
def test_no_text_stands_for_ids_that_the_tokenizer_would_not_make(ids):
    vocabulary = Vocabulary(tiny_tokenizer(), VOCAB)
    text = vocabulary.prompt_text(ids, adds_special_tokens=False)
    assert text is None or tiny_tokenizer()(text)["input_ids"] == ids
    assert text is not None or tiny_tokenizer()(tiny_tokenizer().decode(ids))["input_ids"] != ids


def test_what_a_server_adds_to_a_text_is_left_out_of_it():
    vocabulary = Vocabulary(bos_tokenizer(), len(bos_tokenizer()))
    row = letters()[3:9]
    assert vocabulary.prompt_text([1, *row], adds_special_tokens=True) == letter_tokenizer().decode(row)
    assert vocabulary.prompt_text(row, adds_special_tokens=True) is None


def test_a_name_that_stands_for_several_ids_stands_for_none():
    tokenizer = letter_tokenizer()
    vocabulary = Vocabulary(tokenizer, len(tokenizer))
    assert vocabulary.ids_of([tokenizer.decode([token]) for token in letters()], "text") == letters()
    # Parts of characters all look alike.
    with pytest.raises(RowError):
        vocabulary.ids_of(["\ufffd"], "text")
    with pytest.raises(RowError):
        vocabulary.ids_of(["猫"], "text")
    with pytest.raises(RowError):
        vocabulary.ids_of(["a"], "id")


def test_names_are_looked_up_in_a_table_that_is_whole(monkeypatch):
    """A tokenizer may fail, or Ctrl-C come, while it is asked; other threads may look names up meanwhile."""
    tokenizer = letter_tokenizer()
    vocabulary, name = Vocabulary(tokenizer, len(tokenizer)), Vocabulary.name
    first = tokenizer.decode([letters()[0]])

    def interrupted(self, token, naming):
        if token == len(tokenizer) - 1:
            raise KeyboardInterrupt
        return name(self, token, naming)

    with monkeypatch.context() as patch:
        patch.setattr(Vocabulary, "name", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                vocabulary.ids_of([first], "text")
    assert vocabulary.ids_of([first], "text") == letters()[:1]


@pytest.mark.parametrize("name", [" cat", "token_id:512", "token_id:"])
def test_a_token_that_is_not_named_by_an_id_is_said_to_be(name: str) -> None:
    vocabulary = Vocabulary(tiny_tokenizer(), VOCAB)
    assert vocabulary.ids_of(["token_id:5", "token_id:511"], "id") == [5, 511]
    with pytest.raises(RowError, match=rf"it names token 1 '{name}', which is not token_id: and an id below {VOCAB}"):
        vocabulary.ids_of(["token_id:5", name], "id")
