"""Texts → ids, by the shortest way that a tokenizer has.

Of a fast tokenizer of transformers that is the Rust encoder inside, which its `__call__` wraps in Python that costs
half as much again. Anything else that is callable is called.

Which characters each token stands for costs a fast tokenizer a third more time. Where its tokens are the bytes of the
text, one after another, they are counted instead (`ByteCounts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from corelm.spec.records import TokenizeRequest, TokenizeResult
from corelm.tensors.ragged import Ragged

#: Methods by which a tokenizer's class may change how texts are encoded, and where transformers defines its own.
_ENCODING = ("__call__", "_call_one", "encode_plus", "_encode_plus", "batch_encode_plus", "_batch_encode_plus")
_ORDINARY = "transformers.tokenization_utils"

#: Normalizers of tokenizers that leave ASCII as it is.
_KEEP_ASCII = frozenset({"NFC", "NFD", "NFKC", "NFKD"})

#: Spaces before, between and after words, characters of one to four bytes, and line ends.
_PROBE = "One, a  b\n\n    if x:\t1,234 \u00e9\u00df \u4e2d\u6587 \U0001f600\r\n e "


class Encoder:
    """Encodes with `tokenizer`: a callable that returns `input_ids`, as those of transformers do."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._counted: tuple[int, ByteCounts | None] = (-1, None)

    def __call__(self, request: TokenizeRequest) -> TokenizeResult:
        texts = list(request.texts)
        if not texts:
            return TokenizeResult(ids=Ragged.from_list([]))
        return self._by_call(request, texts) if self._rust is None else self._by_rust(request, texts)

    @cached_property
    def _rust(self) -> Any:
        """The encoder inside, if nothing but transformers' own code stands before it."""
        rust = getattr(self.tokenizer, "backend_tokenizer", None)
        if not hasattr(rust, "encode_batch_fast"):
            return None
        own = any(
            name in vars(cls) and not cls.__module__.startswith(_ORDINARY)
            for cls in type(self.tokenizer).__mro__
            for name in _ENCODING
        )
        return None if own else rust

    def _bytes(self) -> ByteCounts | None:
        size = self._rust.get_vocab_size()
        if size != self._counted[0]:
            # The first time, and after a token was added.
            self._counted = (size, ByteCounts.of(self._rust))
        return self._counted[1]

    def _by_call(self, request: TokenizeRequest, texts: list[str]) -> TokenizeResult:
        # Only what is asked for is passed on, so that a plain callable serves as a tokenizer.
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
        # As a call would leave them; others may have set them in between.
        if rust.truncation is not None:
            rust.no_truncation()
        if rust.padding is not None:
            rust.no_padding()
        as_typed = not request.parse_special or bool(getattr(self.tokenizer, "split_special_tokens", False))
        if rust.encode_special_tokens != as_typed:
            rust.encode_special_tokens = as_typed
        count = self._bytes() if request.offsets and not request.add_special_tokens else None
        if count is not None or not request.offsets:
            ids = _ids(rust.encode_batch_fast(texts, add_special_tokens=request.add_special_tokens))
            offsets = None if count is None else count.offsets(ids, texts)
            if offsets is not None or not request.offsets:
                return TokenizeResult(ids=ids, offsets=offsets)
        encodings = rust.encode_batch(texts, add_special_tokens=request.add_special_tokens)
        return TokenizeResult(ids=_ids(encodings), offsets=_pairs([encoding.offsets for encoding in encodings]))


@dataclass(frozen=True, eq=False)
class ByteCounts:
    """How many bytes of a text every token stands for, in `counts`, int64[vocab]. `normalizer` is the tokenizer's."""

    counts: Tensor
    normalizer: Any

    @classmethod
    def of(cls, rust: Any) -> ByteCounts | None:
        """For byte-level vocabularies, which write a byte as a character; None for others.

        That the counts give what the tokenizer itself says is seen on a probe. One that trims spaces off what a token
        stands for fails it, as does one that puts a space in front.
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
        """int64[total, 2]: the characters [start, end) of its text that each id stands for, all of those it has a byte
        of. None where the ids are not the bytes of the texts, as after a normalizer that changed them.
        """
        simple = all(map(str.isascii, texts))
        changes = self.normalizer is not None and not (simple and type(self.normalizer).__name__ in _KEEP_ASCII)
        if changes and any(self.normalizer.normalize_str(text) != text for text in texts):
            return None
        lengths = torch.tensor(list(map(len, texts)), dtype=torch.int64)
        # ASCII has a byte for every character.
        data = None if simple else [text.encode() for text in texts]
        sizes = lengths if data is None else torch.tensor(list(map(len, data)), dtype=torch.int64)
        counts = self.counts[ids.values]
        found = torch.zeros_like(sizes).index_add_(0, ids.row_index, counts)
        if not torch.equal(found, sizes) or not bool((counts > 0).all()):
            return None
        # Bytes are counted from the start of the first text.
        end = counts.cumsum(0)
        start = end - counts
        if data is not None:
            whole = torch.frombuffer(bytearray(b"".join(data)), dtype=torch.uint8)
            # A byte that goes on a character starts with the bits 10.
            character = ((whole & 0xC0) != 0x80).cumsum(0) - 1
            start, end = character[start], character[end - 1] + 1
        first = (lengths.cumsum(0) - lengths)[ids.row_index]
        return torch.stack([start - first, end - first], -1)


def _ids(encodings: Sequence[Any]) -> Ragged:
    return Ragged.from_list([encoding.ids for encoding in encodings])


def _pairs(rows: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """[start, end) of every token of every row, one after another."""
    pairs = chain.from_iterable(rows)
    return Ragged.from_list([list(chain.from_iterable(pairs))]).values.reshape(-1, 2)
