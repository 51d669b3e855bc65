"""`AnswerTexts`: the text of answers whose tokens arrive little by little, in pieces that are never taken back.

The pieces of an answer, joined, are the text that a result gives for all of its ids. So a piece is held back

- while its last character may be incomplete: a token may end in the middle of a character;
- while it may be the beginning of a stop string, which would not be part of the text;
- while the tokenizer may still change it: some decoders look at several tokens together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from corelm.spec.left_context import HALF_CHARACTER, decoder_after
from corelm.spec.sampling import SamplingParams
from corelm.spec.stop_strings import StopStrings, text_before_stop

_log = logging.getLogger(__name__)

#: After this many tokens the beginning of an answer is no longer decoded again with every token. The last few of them
#: are, because a token's text depends on the tokens before it.
_WINDOW, _OVERLAP = 128, 16
#: A tokenizer that cleans spaces up replaces at most so many characters by fewer.
_CLEANED = 4


class AnswerTexts:
    """Makes an `AnswerText` for each answer of a request.

    >>> class Letters:
    ...     def decode(self, ids, skip_special_tokens=True):
    ...         return "".join(chr(97 + i) for i in ids)
    >>> answer = AnswerTexts(SamplingParams(stop=("cd",)), Letters()).answer()
    >>> answer.add([0, 1, 2]), answer.add([2]), answer.add([3], "stop")
    ('ab', 'c', '')

    Args:
        sampling: the stop strings, and whether special tokens are left out of the text.
        tokenizer: has ``decode(ids, skip_special_tokens=...)``.
    """

    def __init__(self, sampling: SamplingParams, tokenizer: Any) -> None:
        self.stop_strings = StopStrings.of(sampling, tokenizer)
        # Ids that stand for one byte each. A whole run of them is decoded together.
        self.bytes = _byte_ids(tokenizer)
        self.silent = frozenset(getattr(tokenizer, "all_special_ids", ())) if sampling.skip_special_tokens else ()
        self.cleaned = _CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else 0

    def answer(self, before: Sequence[int] = ()) -> AnswerText:
        """Return the text of an answer.

        Args:
            before: the prompt, if the answer continues its text. A message of a chat is a text of its own.
        """
        return AnswerText(self, before)


class AnswerText:
    """The text of one answer; made by `AnswerTexts.answer`."""

    def __init__(self, texts: AnswerTexts, before: Sequence[int] = ()) -> None:
        self._texts = texts
        self._decode = decoder_after(texts.stop_strings.decode, before)
        self._ids: list[int] = []
        self._said = ""
        # The text of the first `_read` ids is `_settled`. It ends with `_shared`, the text of the ids from `_start` on.
        self._start = self._read = 0
        self._settled = self._shared = ""
        self._settle_at = _WINDOW

    def add(self, ids: Sequence[int], finish_reason: str | None = None, text: str | None = None) -> str:
        """Add the next tokens of the answer and return the text that is new and certain.

        Args:
            ids: the tokens.
            finish_reason: why the answer ended with them; None if it goes on.
            text: the engine's own text of the whole answer, if that is not what the tokenizer decodes.
        """
        if finish_reason == "error":
            # The result has no answer in such a row.
            return ""
        self._ids += ids
        whole = self._certain() if finish_reason is None else self._final(finish_reason, text)
        if not whole.startswith(self._said):
            if finish_reason is not None:
                _log.warning("a tokenizer changed text that was already streamed; the result has the right text")
            return ""
        new = whole[len(self._said) :]
        self._said = whole
        return new

    def _final(self, finish_reason: str, text: str | None) -> str:
        stops = self._texts.stop_strings.stops
        text = self._decode(self._ids) if text is None else text
        if finish_reason != "stop" or not stops:
            return text
        return text_before_stop(text, self._decode(self._ids[:-1]), stops)

    def _certain(self) -> str:
        text = self._text_of(self._whole_runs()).rstrip(HALF_CHARACTER)
        if self._texts.cleaned:
            text = text[: -self._texts.cleaned]
        stops = self._texts.stop_strings.stops
        end = len(text) - _beginning_of_stop(text, stops)
        if stops and self._ids:
            # A stop string that the last token has completed ends the answer, unless more tokens come.
            whole, before = (self._text_of(len(self._ids) - less) for less in (0, 1))
            end = min(end, len(text_before_stop(whole, before, stops)))
        return text[:end]

    def _whole_runs(self) -> int:
        """Return the number of ids before the run of bytes at the end."""
        end = length = len(self._ids)
        while end and (self._ids[end - 1] in self._texts.bytes or self._ids[end - 1] in self._texts.silent):
            end -= 1
        return end if self._texts.bytes else length

    def _text_of(self, length: int) -> str:
        """Return the text of the first `length` ids."""
        if length < self._read:
            return self._decode(self._ids[:length])
        text = self._decode(self._ids[self._start : length])
        if not text.startswith(self._shared):
            return self._decode(self._ids[:length])
        text = self._settled + text[len(self._shared) :]
        if length >= self._settle_at:
            self._settle(length)
        return text

    def _settle(self, length: int) -> None:
        """Decode only what follows the first `length` ids from now on, if their text is certain to stay."""
        start = length - _OVERLAP
        text, shared = self._decode(self._ids[:length]), self._decode(self._ids[start:length])
        self._settle_at = length + _OVERLAP
        if shared and text.endswith(shared) and not text.endswith(HALF_CHARACTER):
            self._start, self._read, self._settled, self._shared = start, length, text, shared
            self._settle_at = length + _WINDOW


def _beginning_of_stop(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may begin a stop string."""
    most = 0
    for stop in stops:
        at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        most = max(most, len(text) - at if at >= 0 else 0)
    return most


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens ``<0x00>`` to ``<0xFF>``, which sentencepiece uses for rare characters."""
    if not (hasattr(tokenizer, "convert_tokens_to_ids") and hasattr(tokenizer, "convert_ids_to_tokens")):
        return frozenset()
    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    # An unknown token has the id of another one, or None.
    known = [(token, i) for token, i in zip(tokens, ids, strict=True) if isinstance(i, int)]
    found = tokenizer.convert_ids_to_tokens([i for _, i in known])
    return frozenset(i for (token, i), back in zip(known, found, strict=True) if token == back)
