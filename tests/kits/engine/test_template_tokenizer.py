"""`TemplateTokenizer`: what core reads of a tokenizer, made of an encoder, a decoder, special tokens and a template."""

from __future__ import annotations

from typing import Any

import pytest
from examples.ngram_backend import CHATML

from corelm.errors import InvalidRequestError, TemplateError
from corelm_engine_kit import TemplateTokenizer

#: `<|im_start|>` begins like `<|im`: the longer one is read.
SPECIALS = {"<|im": 256, "<|im_start|>": 257, "<|im_end|>": 258}


def tokenizer(**options: Any) -> TemplateTokenizer:
    return TemplateTokenizer(
        lambda text: list(text.encode()),
        lambda ids: bytes(ids).decode(errors="replace"),
        SPECIALS,
        **{"template": CHATML, "size": 260, "eos": "<|im_end|>", **options},
    )


def test_special_tokens_are_read_only_where_they_may_be() -> None:
    made = tokenizer(bos="<|im")
    assert made(["a<|im_start|>b"])["input_ids"] == [[256, 97, 257, 98]]
    assert made(["<|im_end|>"], add_special_tokens=False, split_special_tokens=True)["input_ids"] == [
        list(b"<|im_end|>")
    ]
    assert made.batch_decode([[97, 258], [258]]) == ["a<|im_end|>", "<|im_end|>"]
    assert made.decode([97, 258, 98], skip_special_tokens=True) == "ab"
    assert len(made) == 260 and made.all_special_ids == [256, 257, 258]
    assert (made.eos_token_id, made.bos_token_id, made.pad_token_id) == (258, 256, 258)


@pytest.mark.parametrize("text", ["", "plain", "naïve 猫 <|im_end|> 🐈!", "<|im_start|><|im_end|>"])
def test_offsets_cover_the_characters_of_each_id(text: str) -> None:
    encoded = tokenizer()([text], add_special_tokens=False, return_offsets_mapping=True)
    (ids,), (spans,) = encoded["input_ids"], encoded["offset_mapping"]
    for token, (start, end) in zip(ids, spans, strict=True):
        assert 0 <= start < end <= len(text)
        if token < 256:
            assert token in text[start:end].encode() and end - start == 1
        else:
            assert SPECIALS[text[start:end]] == token


def test_offsets_of_ids_of_several_characters() -> None:
    words = ["the", " cat", " sat"]
    made = TemplateTokenizer(
        lambda text: [words.index(word) for word in ("the", " cat", " sat") if word in text],
        lambda ids: "".join(words[token] for token in ids),
        {},
        size=3,
    )
    assert made(["the cat sat"], return_offsets_mapping=True)["offset_mapping"] == [[(0, 3), (3, 7), (7, 11)]]
    assert made.eos_token_id is None


def test_conversations_become_text_without_marks_of_generation() -> None:
    made = tokenizer()
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
    assert made.apply_chat_template(chat) == text
    assert made.apply_chat_template(chat[:1], tokenize=True, add_generation_prompt=True)[-10:] == list(b"assistant\n")


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer(template=None).apply_chat_template([])
    refusing = tokenizer(template="{{ raise_exception('no tools') }}")
    with pytest.raises(TemplateError, match="no tools"):
        refusing.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_special_tokens_must_be_known() -> None:
    for options, name in (({"bos": "<s>"}, "bos"), ({"size": 258}, "specials")):
        with pytest.raises(InvalidRequestError) as caught:
            tokenizer(**options)
        assert caught.value.field == name


def test_an_encoder_that_adds_a_space_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TemplateTokenizer(lambda text: list(f" {text}".encode()), lambda ids: bytes(ids).decode(), {}, size=256)
    assert caught.value.field == "encode"
