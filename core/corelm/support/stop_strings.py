"""Where a stop string ends an answer: the token that completes it, and the text before it.

The rule, for every backend:

- A stop string ends an answer with the token that completes it. That token stays in the ids; the text ends before the
  stop string.
- One that was complete before the answer had ``min_new_tokens`` tokens does not count, then or later.
- Text is what the ids decode to after those of the prompt; see `StopStrings.after`. With ``skip_special_tokens`` a
  special token adds none, so a stop string may stretch across it, and one that contains a special token could never be
  found. Core refuses the latter; see `skipped_texts`.
- A token may end in the middle of a character. The decoder shows such a piece as U+FFFD until the next token completes
  it, so U+FFFD at the end of a text is not yet text.

Choose by how the engine works:

- It samples in this process, step by step: `StopStrings.watch`, one watch for each answer.
- It returns whole answers: `StopStrings.first_end`, or `StopStrings.occurs_in` to confirm that it stopped for one.
- Only the text is needed: `text_before_stop`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from corelm.spec.records import GenerateRequest
from corelm.spec.sampling import SamplingParams
from corelm.support.left_context import HALF_CHARACTER, Decode, decoder_after


@dataclass(frozen=True)
class StopStrings:
    """The stop strings of one request.

    >>> letters = StopStrings(("cd",), lambda ids: "".join(chr(97 + i) for i in ids))
    >>> letters.first_end([0, 1, 2, 3, 4])
    4

    Attributes:
        stops: the strings, none of them empty. Without any, nothing ends an answer.
        decode: returns the text of some ids.
        min_new_tokens: a string that is complete earlier does not count.
    """

    stops: tuple[str, ...]
    decode: Decode
    min_new_tokens: int = 0

    @classmethod
    def of(cls, sampling: SamplingParams, tokenizer: Any) -> StopStrings:
        """Return the stop strings of `sampling`, to be found in what `tokenizer` decodes.

        Args:
            tokenizer: has ``decode(ids, skip_special_tokens=...)``, as those of transformers do.
        """

        def decode(ids: list[int]) -> str:
            text: str = tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
            return text

        return cls(sampling.stop, decode, sampling.min_new_tokens)

    @classmethod
    def of_rows(cls, request: GenerateRequest, tokenizer: Any) -> list[StopStrings]:
        """Return the stop strings of each row of a request."""
        stops = cls.of(request.sampling, tokenizer)
        if not stops.stops:
            return [stops] * len(request.prompts)
        return [stops.after(prompt) for prompt in request.prompts.tolist()]

    def after(self, prompt: Sequence[int]) -> StopStrings:
        """Return the same for answers to a prompt: some decoders drop a space where the ids before it are missing."""
        return replace(self, decode=decoder_after(self.decode, prompt)) if self.stops else self

    def first_end(self, ids: Sequence[int]) -> int | None:
        """Return the length of the answer up to and including the token that completes the first stop string.

        None if `ids` completes no stop string. Decodes about log2(len(ids)) times.
        """
        least = max(1, self.min_new_tokens)
        if not self.stops or len(ids) < least:
            return None
        before = self.decode(list(ids[: least - 1])) if least > 1 else ""

        def stopped(length: int) -> bool:
            return self._completed(self.decode(list(ids[:length])), before)

        if not stopped(len(ids)):
            return None
        # The text of a longer answer starts with that of a shorter one, so the first length is found by halving.
        lengths = range(least, len(ids) + 1)
        return lengths[bisect_left(lengths, True, key=stopped)]

    def occurs_in(self, ids: Sequence[int]) -> bool:
        """Return whether any stop string is in the text of an answer, wherever it begins and ends."""
        text = self.decode(list(ids)) if self.stops else ""
        return any(stop in text for stop in self.stops)

    def ends_in_half_a_character(self, ids: Sequence[int]) -> bool:
        """Return whether an answer ends in the middle of a character. An engine may then hold its last text back."""
        return self.decode(list(ids)).endswith(HALF_CHARACTER)

    def watch(self) -> StopStringWatch:
        """Return a watch for one answer that is generated token by token."""
        return StopStringWatch(self)

    def _completed(self, text: str, before: str) -> bool:
        """Whether some stop string ends in the part that `text` has in addition to `before`."""
        return any(stop in text[_search_start(before, stop) :] for stop in self.stops)


class StopStringWatch:
    """Watches one answer grow; made by `StopStrings.watch`.

    It keeps only as many of the latest ids as a stop string can stretch across, so that a step takes the same time
    however long the answer is.
    """

    def __init__(self, stop_strings: StopStrings) -> None:
        self._stop_strings = stop_strings
        self._length = 0
        self._tail: list[int] = []
        # A token in the tail is at least one byte. The margin is for decoders that treat the start of a text
        # differently.
        self._window = max((len(stop.encode()) for stop in stop_strings.stops), default=0) + 4

    def completed_by(self, token: int) -> bool:
        """Add the next token of the answer. Return whether it completes a stop string that counts."""
        self._length += 1
        if not self._stop_strings.stops:
            return False
        before = self._stop_strings.decode(self._tail)
        self._tail.append(token)
        text = self._stop_strings.decode(self._tail)
        if text == before and not text.endswith(HALF_CHARACTER):
            # The token adds no text, so it must not use up the window.
            self._tail.pop()
        del self._tail[: -self._window]
        return self._length >= self._stop_strings.min_new_tokens and self._stop_strings._completed(text, before)


def skipped_texts(tokenizer: Any) -> frozenset[str]:
    """Return the texts of all tokens that `tokenizer` leaves out with ``skip_special_tokens``.

    These are the special tokens that have a name and all others that were added as special tokens. Some tokenizers
    name only a few of theirs.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {token.content for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
    return frozenset(texts - {""})


def stops_without_specials(sampling: SamplingParams, tokenizer: Any) -> tuple[str, ...]:
    """Return the stop strings of `sampling` for which an engine stops at the right token even if it looks for them in a
    text that has the special tokens.

    The text of an answer may have none, so such an engine would also stop for a string that is a piece of a special
    token. The plugin has to find the others in the ids.
    """
    skipped = skipped_texts(tokenizer) if sampling.stop and sampling.skip_special_tokens else ()
    return tuple(stop for stop in sampling.stop if not any(_may_overlap(stop, text) for text in skipped))


def _may_overlap(stop: str, text: str) -> bool:
    """Return whether a place where `stop` occurs may share a character with a place where `text` does."""
    shifted = range(1, min(len(stop), len(text)))
    return stop in text or text in stop or any(stop[:n] == text[-n:] or stop[-n:] == text[:n] for n in shifted)


def text_before_stop(text: str, before: str, stops: Sequence[str]) -> str:
    """Return `text` up to the first stop string that its last token completed, or all of it if there is none.

    A stop string that was complete earlier (within ``min_new_tokens``) did not end the answer and stays.

    >>> text_before_stop("a. b. c", "a. b", ["."])
    'a. b'

    Args:
        text: the answer. before: the answer without its last token.
    """
    found = [at for stop in stops if (at := text.find(stop, _search_start(before, stop))) >= 0]
    return text[: min(found)] if found else text


def _search_start(before: str, stop: str) -> int:
    """The first place where `stop` can begin and still end later than `before` does."""
    # The next token may turn half a character into a whole one, which is then new text.
    return max(0, len(before.rstrip(HALF_CHARACTER)) - len(stop) + 1)
