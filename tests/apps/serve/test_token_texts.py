"""Tokens as texts and bytes: joined, the bytes of the tokens of a text are the bytes of the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from corelm_interop.openai_logprobs import CompletionLogprobs, chat_logprobs
from corelm_interop.token_texts import TokenTexts
from corelm_testing.toy import ByteTokenizer
from helpers.tiny_models import tiny_tokenizer


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_bytes_of_byte_level_tokens_are_those_of_the_text(text: str) -> None:
    ids = tiny_tokenizer()(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    found = TokenTexts(tiny_tokenizer()).of(ids)
    assert b"".join(each.data or b"?" for each in found) == text.encode()
    assert all(each.partial or each.text.encode() == each.data for each in found)


def sentencepiece() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the pieces and the byte tokens of SentencePiece."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁", "é", "t", "h", "e", "▁t"]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def test_pieces_of_sentencepiece_keep_their_space_and_bytes_are_bytes() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["▁the", "é", "<0xE2>", "<0x82>", "<0xAC>"])
    found = TokenTexts(tokenizer).of(ids)
    assert [each.data for each in found] == [b" the", "é".encode(), b"\xe2", b"\x82", b"\xac"]
    assert [each.text for each in found] == [" the", "é", "\\xe2", "\\x82", "\\xac"]
    assert [each.partial for each in found] == [False, False, True, True, True]


def test_pieces_of_several_spaces_keep_all_of_them() -> None:
    pieces = ["<unk>", "▁", "▁▁", "▁▁▁▁", "▁▁x", "x"]
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    # As Llama 2 and Mistral decode: without the first space of a text.
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    ids = tokenizer.convert_tokens_to_ids(["x", *pieces[1:]])
    found = TokenTexts(tokenizer).of(ids)
    assert "".join(each.text for each in found) == tokenizer.decode(ids) == "x" + " " * 7 + "  xx"
    assert all(each.data == each.text.encode() for each in found)


def test_a_tokenizer_that_does_not_tell_bytes_gives_none_for_parts_of_characters() -> None:
    found = TokenTexts(ByteTokenizer()).of([*"aé".encode(), ByteTokenizer.eos_token_id])
    assert [each.data for each in found] == [b"a", None, None, b"<|im_end|>"]


def test_the_shapes_of_the_protocol_show_parts_of_characters() -> None:
    texts = TokenTexts(sentencepiece())
    ids = sentencepiece().convert_tokens_to_ids(["t", "<0xE2>", "<0x82>", "<0xAC>", "e"])
    logprobs = [-0.5, -1.0, -1.5, -2.0, -2.5]
    chat = chat_logprobs(texts, ids, logprobs, None)["content"]
    assert [each["bytes"] for each in chat] == [[116], [0xE2], [0x82], [0xAC], [101]]
    assert [each["logprob"] for each in chat] == logprobs
    older = CompletionLogprobs(texts, sentencepiece(), ()).add(ids, logprobs, None)
    assert older["tokens"] == ["t", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "e"]
    assert older["text_offset"] == [0, 1, 1, 1, 2]
    top = [[(each, logprob)] for each, logprob in zip(ids, logprobs, strict=True)]
    by_id = CompletionLogprobs(texts, sentencepiece(), (), by_id=True).add(ids, logprobs, top)
    assert by_id["tokens"] == [f"token_id:{each}" for each in ids] and by_id["text_offset"] == older["text_offset"]
    assert by_id["top_logprobs"] == [{name: logprob} for name, logprob in zip(by_id["tokens"], logprobs, strict=True)]


@pytest.mark.parametrize("ids", [[0, 1], [1, 0]])
def test_of_tokens_with_one_text_the_most_probable_counts(ids: list[int]) -> None:
    class Twins:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "a" * len(ids)

    shape = CompletionLogprobs(TokenTexts(Twins()), Twins(), ())
    found = shape.add(ids, [-1.0, -3.0], [[(0, -1.0), (1, -3.0)]] * 2)
    assert found["top_logprobs"] == [{"a": -1.0}, {"a": -1.0}]
