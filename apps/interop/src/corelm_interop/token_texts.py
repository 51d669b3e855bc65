"""`TokenTexts`: each token as a text and as bytes, as the protocol shows the tokens that log-probs are of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from corelm.spec.answer_text import HALF_CHARACTER

#: A space at the beginning of a token of SentencePiece.
_SPACE = "▁"


def _byte_of_letter() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    Printable bytes stand for themselves, and the others are the letters from U+0100 on, in order (GPT-2).
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_of_letter()


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token.

    Attributes:
        text: its text. A token that is a part of a character is shown as ``\\xe2\\x82``.
        data: its bytes; None if the tokenizer does not tell them.
    """

    text: str
    data: bytes | None

    @property
    def partial(self) -> bool:
        """Whether the token is a part of a character, or several such parts."""
        return self.data is not None and _is_partial(self.data)


class TokenTexts:
    """Remembers the text of every token that was asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def of(self, ids: Collection[int]) -> list[TokenText]:
        """Return one text per id."""
        if new := [each for each in dict.fromkeys(ids) if each not in self._known]:
            decode_rows = getattr(self._tokenizer, "decode_rows", None)
            rows = [[each] for each in new]
            if decode_rows is not None:  # one call to the process of the tokenizer
                texts = decode_rows(rows, skip_special_tokens=False)
            else:
                texts = [self._tokenizer.decode(row, skip_special_tokens=False) for row in rows]
            for each, token, text in zip(new, self._tokens(new), texts, strict=True):
                self._known[each] = _shown(token, text)
        return [self._known[each] for each in ids]

    def _tokens(self, ids: list[int]) -> Sequence[str | None]:
        """Return the tokens as the vocabulary spells them; None where the tokenizer does not tell."""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        return [None] * len(ids) if convert is None else convert(ids)


def _shown(token: str | None, text: str) -> TokenText:
    data = None if token is None else _data(token, text)
    if data is None:
        return TokenText(text, None if HALF_CHARACTER in text else text.encode(errors="replace"))
    if _is_partial(data):
        return TokenText("".join(f"\\x{byte:02x}" for byte in data), data)
    return TokenText(data.decode(), data)


def _data(token: str, text: str) -> bytes | None:
    """Return the bytes of a token whose text was decoded alone; None if the vocabulary does not tell them."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    if token.startswith(_SPACE) and token.replace(_SPACE, " ") == f" {text}":
        # SentencePiece drops the first space of a text.
        return f" {text}".encode()
    if all(letter in _BYTES for letter in token):
        data = bytes(_BYTES[letter] for letter in token)
        # A vocabulary that is not byte-level may use the same letters for themselves.
        if data.decode(errors="replace") == text:
            return data
    return None


def _is_partial(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False
