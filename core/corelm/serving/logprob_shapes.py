"""Log-probs in the two shapes of the protocol: that of chat completions, and the older one of completions."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any

from corelm.serving.answers import Top
from corelm.serving.token_texts import TokenText, TokenTexts


def chat_logprobs(
    texts: TokenTexts, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Top] | None
) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat completion.

    Args:
        texts: the texts of the tokens.
        ids: the tokens.
        logprobs: one per token.
        top: the most probable ids at each token, or None.
    """
    content = []
    for at, (text, logprob) in enumerate(zip(texts.of(ids), logprobs, strict=True)):
        best = top[at] if top is not None else []
        others = texts.of([each for each, _ in best])
        alternatives = [_entry(other, value) for other, (_, value) in zip(others, best, strict=True)]
        content.append({**_entry(text, logprob), "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def _entry(text: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": text.text, "bytes": None if text.data is None else list(text.data), "logprob": logprob}


#: The most tokens of a byte or more that are one character.
_LONGEST_CHARACTER = 4


class CompletionLogprobs:
    """Makes the `logprobs` of one choice of a completion, piece by piece.

    Args:
        texts: the texts of the tokens.
        silent: the ids that the text of an answer leaves out.
        by_id: whether to name tokens by their ids, as ``token_id:5``, instead of by their texts.
    """

    def __init__(self, texts: TokenTexts, silent: Collection[int], *, by_id: bool = False) -> None:
        self._texts, self._silent, self._by_id = texts, silent, by_id
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[Top] | None,
        prompt: str | None = None,
    ) -> dict[str, Any]:
        """Return the `logprobs` of the next tokens.

        Args:
            ids: the tokens.
            logprobs: one per token; None for the first token of a prompt.
            top: the most probable ids at each token, or None.
            prompt: the text, if they are those of a prompt; the tokenizer may have added special tokens to it.
        """
        shown = self._texts.of(ids)
        offsets = []
        for each, text in zip(ids, shown, strict=True):
            said = text.text if text.data is None else self._decoder.decode(text.data)
            absent = prompt is None and each in self._silent
            if prompt is not None:
                # Not there are special tokens that the tokenizer has added, and parts of characters.
                at = prompt.find(said, self._offset, self._offset + len(said) + _LONGEST_CHARACTER)
                self._offset, absent = max(at, self._offset), at < 0
            offsets.append(self._offset)
            self._offset += 0 if absent else len(said)
        if prompt is not None:
            self._offset = len(prompt)
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
