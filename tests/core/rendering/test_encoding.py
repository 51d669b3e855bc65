"""`Encoder`, compared with the tokenizer's own `__call__`."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from corelm import Backend, Ragged, hookimpl
from corelm.errors import EngineError
from corelm.rendering.encoding import Encoder
from corelm.spec.records import TokenizeRequest, TokenizeResult
from helpers.each import each
from helpers.fakes import Fake

TEXT = "The quick brown fox, née Füchsin, says: 你好 🦊!\n\n    return x  +  1\n" * 3
SPECIALS = ["<|pad|>", "<|end|>"]


def build(prefix: bool = False) -> PreTrainedTokenizerFast:
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=rust, pad_token="<|pad|>", eos_token="<|end|>")


def pieces() -> PreTrainedTokenizerFast:
    """A vocabulary of words with a mark for the space, as in sentencepiece. It is not byte-level."""
    rust = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIALS], show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=rust, pad_token="<|pad|>", eos_token="<|end|>", unk_token="<unk>")


TOKENIZERS: dict[str, PreTrainedTokenizerFast] = {
    "bytes": build(),
    "a space in front": build(prefix=True),
    "pieces": pieces(),
}
TEXTS = [
    "",
    " ",
    "ab<unk>\t  ab",
    "The fox",
    "née\n  Füchsin 🦊 ",
    "e\u0301 is two",
    "<|end|> and <|pad|><|end|>",
    "你好 " * 5,
]


def request(texts: list[str], **options: Any) -> TokenizeRequest:
    return TokenizeRequest(texts=tuple(texts), **{"add_special_tokens": False, **options})


def assert_as_called(tokenizer: Any, asked: TokenizeRequest) -> TokenizeResult:
    found = Encoder(tokenizer)(asked)
    wanted = tokenizer(
        list(asked.texts),
        add_special_tokens=asked.add_special_tokens,
        split_special_tokens=not asked.parse_special,
        return_offsets_mapping=True,
    )
    assert found.ids.tolist() == wanted["input_ids"]
    if asked.offsets:
        assert found.offsets is not None
        assert found.offsets.tolist() == [list(pair) for row in wanted["offset_mapping"] for pair in row]
    else:
        assert found.offsets is None
    return found


@each("tokenizer", TOKENIZERS.values())
@each("add_special_tokens", [False, True])
@each("parse_special", [False, True])
@each("offsets", [False, True])
def test_every_combination_of_options(
    tokenizer: Any, add_special_tokens: bool, parse_special: bool, offsets: bool
) -> None:
    asked = request(TEXTS, add_special_tokens=add_special_tokens, parse_special=parse_special, offsets=offsets)
    assert_as_called(tokenizer, asked)


def test_settings_left_by_another_call_are_reset() -> None:
    tokenizer, encoder = build(), Encoder(build())
    encoder.tokenizer = tokenizer
    wanted = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    tokenizer(TEXTS, padding=True, truncation=True, max_length=2, split_special_tokens=True, return_tensors="pt")
    assert encoder(request(TEXTS)).ids.tolist() == wanted


def test_any_callable_works_and_gets_only_the_requested_options() -> None:
    seen: list[dict[str, Any]] = []

    def words(texts: list[str], **options: Any) -> dict[str, Any]:
        seen.append(options)
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}

    batch = Encoder(words)(request(["a bc", ""], add_special_tokens=True))
    assert batch.ids.tolist() == [[1, 2], []] and batch.ids.values.dtype == torch.int64
    assert seen == [{"add_special_tokens": True}]
    assert len(Encoder(words)(request([])).ids) == 0 and len(seen) == 1


class Tokenizing(Fake):
    """Encodes into buffers that the next call reuses; `bend` changes the offsets."""

    def __init__(self, bend=lambda offsets: offsets):
        super().__init__()
        self.offsets = bend
        self.ids, self.spans = torch.zeros(9, dtype=torch.int64), torch.zeros(9, 2, dtype=torch.int64)

    @hookimpl
    def tokenize(self, request):
        lengths = torch.tensor([len(text) for text in request.texts])
        count = int(lengths.sum())
        self.ids[:count] = torch.tensor([int(digit, 16) for digit in "".join(request.texts)])
        starts = Ragged(self.ids[:count], lengths).positions
        self.spans[:count] = torch.stack([starts, starts + 1], -1)
        return TokenizeResult(ids=Ragged(self.ids[:count], lengths), offsets=self.offsets(self.spans[:count]))


def test_a_plugin_may_reuse_the_buffers_of_its_tokens():
    backend = Backend.from_plugin(Tokenizing(), "fake")
    first = backend.tokenize(["12", "3"], offsets=True)
    backend.tokenize(["456"], offsets=True)
    assert first.ids.tolist() == [[1, 2], [3]] and first.offsets.tolist() == [[0, 1], [1, 2], [0, 1]]


@each(
    "bend, says",
    [
        (lambda offsets: offsets[:-1], "lengths add up to 3, but there are 2 values"),
        (lambda offsets: offsets.float(), r"offsets are torch.float32\[3, 2\]"),
        (lambda offsets: offsets.flatten(), "there are 6 values"),
        (lambda offsets: offsets.to_sparse(), "not dense"),
        (lambda offsets: offsets.tolist(), "its result cannot be read"),
        (lambda offsets: offsets - 1, "row 0, position 0: the id covers other"),
        (lambda offsets: offsets.flip(-1), "row 0, position 0: the id covers other"),
        (lambda offsets: offsets + 1, "row 0, position 1: the id covers other"),
        (lambda offsets: torch.tensor([[0, 1], [1, 2], [2, 3]]), "row 1, position 0: the id covers other"),
    ],
)
def test_offsets_that_do_not_fit_the_texts_are_refused(bend, says):
    with pytest.raises(EngineError, match=f"hook tokenize: .*{says}"):
        Backend.from_plugin(Tokenizing(bend), "fake").tokenize(["12", "3"], offsets=True)
