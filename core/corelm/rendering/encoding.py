"""Texts to ids and ids to texts, by the fastest path that a tokenizer offers.

For a fast tokenizer of transformers, core calls the Rust encoder inside it, because the Python code of its `__call__`
adds half of the encoder's time. Every other tokenizer is called.

Character offsets cost a fast tokenizer a third more time. If the tokens are the bytes of the text, in order, core
counts bytes instead (`ByteCounts`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from corelm.errors import Problems
from corelm.spec.answer_text import LeftContexts
from corelm.spec.records import TokenizeRequest, TokenizeResult
from corelm.tensors.ragged import Ragged

#: Methods that a tokenizer's class can override to change how texts are encoded, and the modules of transformers that
#: define the originals.
_ENCODING = ("__call__", "_encode_plus")
_ORIGINAL_MODULES = "transformers.tokenization_utils"

#: Normalizers of the tokenizers library that leave ASCII unchanged.
_KEEP_ASCII = frozenset({"NFC", "NFD", "NFKC", "NFKD"})

#: A text with spaces before, between and after words, characters of one to four bytes, and line ends.
_PROBE = "One, a  b\n\n    if x:\t1,234 \u00e9\u00df \u4e2d\u6587 \U0001f600\r\n e "


class Encoder:
    """Encodes texts with `tokenizer`, a callable that returns a mapping with `input_ids`, as in transformers.

    One thread encodes at a time, because encoding changes the tokenizer's settings.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.RLock()
        #: The size of the vocabulary, and the byte counts made for it.
        self._byte_counts_cache: tuple[int, ByteCounts | None] = (-1, None)

    def __call__(self, request: TokenizeRequest) -> TokenizeResult:
        texts = list(request.texts)
        if not texts:
            return TokenizeResult(ids=Ragged.from_list([]))
        with self._lock:
            return self._by_call(request, texts) if self._rust is None else self._by_rust(request, texts)

    @cached_property
    def _rust(self) -> Any:
        """The Rust encoder inside the tokenizer; None if the tokenizer's class overrides how texts are encoded."""
        rust = getattr(self.tokenizer, "backend_tokenizer", None)
        if not hasattr(rust, "encode_batch_fast"):
            return None
        overridden = any(
            name in vars(cls) and not cls.__module__.startswith(_ORIGINAL_MODULES)
            for cls in type(self.tokenizer).__mro__
            for name in _ENCODING
        )
        return None if overridden else rust

    def byte_counts(self) -> ByteCounts | None:
        """Return the byte counts of the tokenizer, or None if its tokens are not the bytes of the text."""
        size = self._rust.get_vocab_size()
        if size != self._byte_counts_cache[0]:
            # The first call, or the first one after a token was added.
            self._byte_counts_cache = (size, ByteCounts.of(self._rust))
        return self._byte_counts_cache[1]

    def _by_call(self, request: TokenizeRequest, texts: list[str]) -> TokenizeResult:
        # Pass only the options that differ from their defaults, so that a plain callable works as a tokenizer.
        options: dict[str, Any] = {"add_special_tokens": request.add_special_tokens}
        if not request.parse_special:
            options["split_special_tokens"] = True
        if request.offsets:
            options["return_offsets_mapping"] = True
        encoded = self.tokenizer(texts, **options)
        return TokenizeResult(
            ids=Ragged.from_list(encoded["input_ids"]),
            offsets=_pairs(encoded["offset_mapping"]) if request.offsets else None,
        )

    def _by_rust(self, request: TokenizeRequest, texts: list[str]) -> TokenizeResult:
        rust = self._rust
        # Reset what other callers may have set, as a call of the tokenizer would.
        if rust.truncation is not None:
            rust.no_truncation()
        if rust.padding is not None:
            rust.no_padding()
        literal = not request.parse_special or bool(getattr(self.tokenizer, "split_special_tokens", False))
        if rust.encode_special_tokens != literal:
            rust.encode_special_tokens = literal
        byte_counts = self.byte_counts() if request.offsets and not request.add_special_tokens else None
        if byte_counts is not None or not request.offsets:
            ids = _ids(rust.encode_batch_fast(texts, add_special_tokens=request.add_special_tokens))
            offsets = None if byte_counts is None else byte_counts.offsets(ids, texts)
            if offsets is not None or not request.offsets:
                return TokenizeResult(ids=ids, offsets=offsets)
        encodings = rust.encode_batch(texts, add_special_tokens=request.add_special_tokens)
        return TokenizeResult(ids=_ids(encodings), offsets=_pairs([encoding.offsets for encoding in encodings]))


@dataclass(frozen=True, eq=False)
class ByteCounts:
    """The number of bytes of a text that each token covers.

    Attributes:
        counts: int64[vocab].
        normalizer: the tokenizer's normalizer, or None.
    """

    counts: Tensor
    normalizer: Any

    @classmethod
    def of(cls, rust: Any) -> ByteCounts | None:
        """Return the counts for a byte-level vocabulary, which writes a byte as a character; None for any other.

        A probe text checks that the counts give the same offsets as the tokenizer. A tokenizer that trims spaces off
        its offsets fails the check, and so does one that puts a space before a text.
        """
        tokens = rust.get_added_tokens_decoder()
        if any(token.lstrip or token.rstrip for token in tokens.values()):
            return None
        added = {token_id: token.content.encode() for token_id, token in tokens.items()}
        vocabulary = rust.get_vocab(with_added_tokens=True)
        counts = torch.zeros(max(vocabulary.values(), default=-1) + 1, dtype=torch.int64)
        ids = torch.tensor(list(vocabulary.values()), dtype=torch.int64)
        counts[ids] = torch.tensor([len(added.get(i, token)) for token, i in vocabulary.items()], dtype=torch.int64)
        found = cls(counts, rust.normalizer)
        probe = _PROBE + "".join(token.decode() + _PROBE for token in added.values())
        encoding = rust.encode(probe, add_special_tokens=False)
        offsets = found.offsets(_ids([encoding]), [probe])
        return found if offsets is not None and torch.equal(offsets, _pairs([encoding.offsets])) else None

    def offsets(self, ids: Ragged, texts: Sequence[str]) -> Tensor | None:
        """Return int64[total, 2]: for each id, the characters [start, end) of its text of which it has a byte.

        None if the ids are not the bytes of the texts, because a normalizer changed the texts, for example.
        """
        ascii_only = all(map(str.isascii, texts))
        changes = self.normalizer is not None and not (ascii_only and type(self.normalizer).__name__ in _KEEP_ASCII)
        if changes and any(self.normalizer.normalize_str(text) != text for text in texts):
            return None
        lengths = torch.tensor(list(map(len, texts)), dtype=torch.int64)
        # In ASCII, every character is one byte.
        data = None if ascii_only else [text.encode() for text in texts]
        sizes = lengths if data is None else torch.tensor(list(map(len, data)), dtype=torch.int64)
        counts = self.counts[ids.values]
        found = torch.zeros_like(sizes).index_add_(0, ids.row_index, counts)
        if not torch.equal(found, sizes) or not bool((counts > 0).all()):
            return None
        # Count bytes from the start of the first text.
        end = counts.cumsum(0)
        start = end - counts
        if data is not None:
            whole = torch.frombuffer(bytearray(b"".join(data)), dtype=torch.uint8)
            # Every byte of a character except its first starts with the bits 10.
            character = ((whole & 0xC0) != 0x80).cumsum(0) - 1
            start, end = character[start], character[end - 1] + 1
        first = (lengths.cumsum(0) - lengths)[ids.row_index]
        return torch.stack([start - first, end - first], -1)


def decoded(
    tokenizer: Any,
    rows: Sequence[list[int]],
    skip_special_tokens: bool,
    before: Sequence[Sequence[int]] | None = None,
) -> list[str]:
    """Return one text per row of ids: what it adds to the text of the ids `before` it, if these are given."""

    # A tokenizer in another process decodes all rows in one call.
    decode_rows = getattr(tokenizer, "decode_rows", None)
    if decode_rows is None:
        decode_rows = partial(map, partial(tokenizer.decode, skip_special_tokens=skip_special_tokens))
    else:
        decode_rows = partial(decode_rows, skip_special_tokens=skip_special_tokens)
    return list(decode_rows(rows)) if before is None else LeftContexts(decode_rows, before).texts(rows)


def _ids(encodings: Sequence[Any]) -> Ragged:
    return Ragged.from_list([encoding.ids for encoding in encodings])


def _pairs(rows: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return int64[total, 2]: [start, end) of every token of every row, one after another."""
    pairs = chain.from_iterable(rows)
    return Ragged.from_list([list(chain.from_iterable(pairs))]).values.reshape(-1, 2)


# Prompts and the texts that continue them: where in the ids of both does the completion begin? ------------------------


class Tokenize(Protocol):
    """Texts to ids, one row per text, as `Backend.tokenize` does it."""

    def __call__(
        self, texts: Sequence[str], *, add_special_tokens: bool, parse_special: bool = True, offsets: bool = False
    ) -> TokenizeResult: ...


#: How prompt and completion become ids: tokenized as one text, or each by itself.
Boundary = Literal["joint", "separate"]

NO_PROMPT = (
    "the prompt has no tokens, and only a token after another one has a log-prob; give a longer prompt, or begin it "
    "with the tokenizer's BOS or EOS token, as lm-eval does"
)
NO_COMPLETION = "the completion has no tokens, so there is nothing to score"


@dataclass(frozen=True, slots=True, eq=False)
class EncodedCompletions:
    """Prompts and completions as ids, one row per pair.

    Attributes:
        ids: the ids of prompt and completion together.
        starts: int64[rows], the position in `ids` at which the completion begins.
        problems: the rows that cannot be scored, and why.
        merged: the rows in which a token holds the end of the prompt and the beginning of the completion.
    """

    ids: Ragged
    starts: Tensor
    problems: Problems
    merged: tuple[int, ...]


def encode_completions(
    tokenize: Tokenize,
    prompts: Sequence[str],
    completions: Sequence[str],
    boundary: Boundary = "joint",
    options: Mapping[str, Any] | None = None,
) -> EncodedCompletions:
    """Tokenize pairs of a prompt and a completion.

    "joint" does what lm-eval does: whitespace at the end of a prompt belongs to the completion, both are tokenized
    together, and the completion begins after as many tokens as the prompt has alone. "separate" tokenizes both by
    themselves and joins the ids, as `DPOTrainer` of TRL 0.26 does.

    Special tokens that the tokenizer adds at the end of a text never count as the prompt's: with "joint" they follow
    the completion, with "separate" they are left out.

    `options` are `add_special_tokens` and `parse_special`, for `tokenize`.
    """
    options = {"add_special_tokens": True, **(options or {})}
    joint = boundary == "joint"
    starts_of = [prompt.rstrip() for prompt in prompts] if joint else list(prompts)
    place = {text: number for number, text in enumerate(dict.fromkeys(starts_of))}
    alone = tokenize(list(place), **options).ids
    alone = alone.slice(torch.zeros_like(alone.lengths), (alone.lengths - _ending(tokenize, options)).clamp_min(0))
    first = alone.select(torch.tensor([place[text] for text in starts_of], dtype=torch.int64))
    if joint:
        ids = tokenize([prompt + rest for prompt, rest in zip(prompts, completions, strict=True)], **options).ids
    else:
        ids = first.join(tokenize(list(completions), **{**options, "add_special_tokens": False}).ids)
    starts = torch.minimum(first.lengths, ids.lengths)
    problems: Problems = {}
    for row, (start, length) in enumerate(zip(first.lengths.tolist(), ids.lengths.tolist(), strict=True)):
        if start == 0:
            problems[row] = NO_PROMPT
        elif start >= length:
            problems[row] = f"prompt and completion together have {length} tokens, and the prompt alone has {start}"
            if completions[row].strip():
                problems[row] += "; they merge into one token, so begin the completion with a space"
    before = ids.slice(torch.zeros_like(starts), starts)
    pairs = zip(before.tolist(), first.tolist(), strict=True) if joint else ()
    merged = tuple(row for row, (one, other) in enumerate(pairs) if one != other and row not in problems)
    return EncodedCompletions(ids, starts, problems, merged)


def _ending(tokenize: Tokenize, options: Mapping[str, Any]) -> int:
    """Return how many special tokens the tokenizer adds at the end of a text."""
    if not options["add_special_tokens"]:
        return 0
    (full,) = tokenize(["a"], **options).ids.tolist()
    (bare,) = tokenize(["a"], **{**options, "add_special_tokens": False}).ids.tolist()
    ends = [at + len(bare) for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
    return len(full) - ends[-1] if ends else 0
