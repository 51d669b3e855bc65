"""What make test shows on a trained model, in seconds."""

from itertools import pairwise
from typing import Any

import pytest

import corelm
from corelm import Backend
from corelm.errors import InvalidRequestError
from helpers.real_checks import Rows
from helpers.real_engine import RealModelPromises
from helpers.real_model import gguf_file

TEXTS = (
    "It costs 123 dollars, or 4567.89",
    "½ ³ ٣ x²",
    "def f(x):\n\treturn x[10:20]  # 0xFF",
    "naïve café, Ωμέγα, 日本語",
    "👩\u200d🚀🚀",
    "  two  spaces\n\n",
)


def test_texts_come_back_and_each_digit_is_a_token_of_the_file(tokenizer: Any) -> None:
    from gguf import GGUFReader

    fields = GGUFReader(gguf_file()).fields
    entries, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    assert tokenizer.get_vocab() == {entry: number for number, entry in enumerate(entries)}
    # GGUF has the bytes of a token as the characters that GPT-2 gave them.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert b"".join(bytes(byte_of[each] for each in entries[token]) for token in ids).decode() == text
        assert tokenizer.decode(ids) == text
        digits = [entries[token] for token in ids if any(each.isdigit() and each.isascii() for each in entries[token])]
        assert digits == [each for each in text if each.isdigit() and each.isascii()]
    # Numbers of all scripts are tokens of their own, which the file's merges make of the bytes of each.
    rank_of = {tuple(each.split(" ")): rank for rank, each in enumerate(merges)}
    char_of = {byte: char for char, byte in byte_of.items()}
    for text in ("1234567890", "½ ³ ٣", "Ⅷ ४२ ²"):
        bytes_of_each = ["".join(char_of[byte] for byte in char.encode()) for char in text]
        expected = [token for each in bytes_of_each for token in merged(each, rank_of)]
        assert [entries[token] for token in tokenizer(text).input_ids] == expected, text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi 42"}], add_generation_prompt=True).input_ids
    special = [entries[token] for token in chat if entries[token].startswith("<|")]
    assert special == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]


def merged(word: str, rank_of: dict[tuple[str, ...], int]) -> list[str]:
    """Return the tokens that merges make of a word: the first of them wherever it fits, again and again."""
    parts = list(word)
    while ranks := [(rank_of[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in rank_of]:
        _, at = min(ranks)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def test_it_knows_something(backend: Backend, tokenizer: Any, rows: Rows) -> None:
    made = backend.generate(rows[:1], {"temperature": 0.0, "max_new_tokens": 2})
    assert tokenizer.decode(made.ids.tolist()[0]) == " Paris."


class TestRealModel(RealModelPromises):
    few_tokens = 4


def test_a_gguf_file_is_refused_at_once() -> None:
    file = gguf_file()
    for field, model, options in (
        ("model", file, {}),
        ("model", str(file), {"tokenizer": "other"}),
        ("model_kwargs", file.parent, {"model_kwargs": {"gguf_file": file.name}}),
    ):
        with pytest.raises(InvalidRequestError, match="GGUF") as refused:
            corelm.get_backend("transformers", model, **options)
        assert refused.value.field == field
