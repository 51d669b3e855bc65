"""Log-probs in the two shapes of the protocol: that of chat completions, and the older one of completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from corelm.spec.answer_text import HALF_CHARACTER, Decode, decoder_after
from corelm_interop.openai_answers import ScoredPrompt, Top
from corelm_interop.token_texts import TokenText, TokenTexts


def chat_logprobs(
    texts: TokenTexts, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Top] | None
) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat completion."""
    content = []
    for at, (text, logprob) in enumerate(zip(texts.of(ids), logprobs, strict=True)):
        best = top[at] if top is not None else []
        others = texts.of([each for each, _ in best])
        alternatives = [_entry(other, value) for other, (_, value) in zip(others, best, strict=True)]
        content.append({**_entry(text, logprob), "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def _entry(text: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": text.text, "bytes": None if text.data is None else list(text.data), "logprob": logprob}


#: So many tokens are decoded together, with those before them, to tell where each begins.
_WINDOW = 16


class _Offsets:
    """Where the text of each next token begins in the text that clients see."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._earlier, self._ids = [*before], list[int]()
        self._after = decoder_after(decode, self._earlier)
        self._start, self._text, self._begin = 0, "", 0

    def next(self, token: int, text: TokenText) -> int:
        """Return how many characters precede the token; for a part of a character, those before that character."""
        self._ids.append(token)
        before, self._text = self._text, self._after(self._ids)
        # In UTF-8, every byte of a character except its first starts with the bits 10.
        goes_on = self._text == before or (text.data and text.data[0] & 0xC0 == 0x80)
        if not (goes_on and before.endswith(HALF_CHARACTER)):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(before, self._text, strict=False))
            self._begin = self._start + len([*same])
        if len(self._ids) >= _WINDOW and not self._text.endswith(HALF_CHARACTER):
            self._start += len(self._text)
            self._earlier += self._ids
            self._after = decoder_after(self._decode, self._earlier)
            self._ids, self._text = [], ""
        return self._begin


class CompletionLogprobs:
    """Makes the `logprobs` of one choice of a completion, piece by piece.

    Args:
        prompt: the prompt, which the answer continues.
        skip_special_tokens: whether special tokens are no text of an answer.
        by_id: whether to name tokens by their ids, as ``token_id:5``, instead of by their texts.
    """

    def __init__(
        self,
        texts: TokenTexts,
        tokenizer: Any,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        by_id: bool = False,
    ) -> None:
        self._texts, self._by_id = texts, by_id
        self._spelled = partial(tokenizer.decode, skip_special_tokens=False)
        self._offsets = _Offsets(partial(tokenizer.decode, skip_special_tokens=skip_special_tokens), prompt)
        self._echoed = 0

    def add(self, ids: Sequence[int], logprobs: Sequence[float | None], top: Sequence[Top] | None) -> dict[str, Any]:
        """Return the `logprobs` of the next tokens of an answer."""
        return self._shape(ids, logprobs, top, [self._echoed + at for at in self._next(self._offsets, ids)])

    def echo(self, prompt: ScoredPrompt, text: str) -> dict[str, Any]:
        """Return the `logprobs` of the prompt, which precedes an answer as this text."""
        self._echoed, begins = len(text), _Offsets(self._spelled)
        # The tokenizer may have added special tokens around the text.
        added = max(self._spelled([*prompt.ids]).find(text), 0)
        offsets = [min(max(at - added, 0), len(text)) for at in self._next(begins, prompt.ids)]
        return self._shape(prompt.ids, prompt.logprobs, prompt.top, offsets)

    def _next(self, begins: _Offsets, ids: Sequence[int]) -> list[int]:
        return [begins.next(token, text) for token, text in zip(ids, self._texts.of(ids), strict=True)]

    def _shape(
        self, ids: Sequence[int], logprobs: Sequence[float | None], top: Sequence[Top] | None, offsets: list[int]
    ) -> dict[str, Any]:
        names, best = self._names(ids), None
        if top is not None:
            best = [
                None if logprob is None else self._best(name, logprob, pairs)
                for name, logprob, pairs in zip(names, logprobs, top, strict=True)
            ]
        return {"tokens": names, "token_logprobs": list(logprobs), "top_logprobs": best, "text_offset": offsets}

    def _names(self, ids: Sequence[int]) -> list[str]:
        return [f"token_id:{each}" for each in ids] if self._by_id else list(map(_legacy, self._texts.of(ids)))

    def _best(self, name: str, logprob: float, pairs: Top) -> dict[str, float]:
        """Return the most probable tokens, and the token itself. Of tokens with one name, the most probable counts."""
        found: dict[str, float] = {}
        for other, (_, value) in zip(self._names([each for each, _ in pairs]), pairs, strict=True):
            found.setdefault(other, value)
        found.setdefault(name, logprob)
        return found


def _legacy(text: TokenText) -> str:
    return f"bytes:{text.text}" if text.partial else text.text
