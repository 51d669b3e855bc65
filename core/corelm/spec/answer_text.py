"""The text of answers: what ids add to the text before them, where stop strings end it, and how it is streamed.

`LeftContexts`: some decoders make another text of ids that stand alone: those of SentencePiece drop the first space
of a text, and a character may have bytes on both sides. So an answer is decoded together with the end of its prompt.

`StopStrings` has the rule for every backend:

- A stop string ends an answer with the token that completes it. That token stays in the ids; the text ends
  before the stop string.
- One that was complete before the answer had ``min_new_tokens`` tokens does not count, then or later.
- Text is what the ids decode to after those of the prompt. With ``skip_special_tokens`` a stop string may stretch
  across a special token; core refuses one that contains it, which could never be found.
- No stop string counts in the reasoning of an answer (`SamplingParams.reasoning_marks`).
- The decoder shows a piece of a character as U+FFFD, so U+FFFD at the end of a text is not yet text.

An engine that samples in this process uses `StopStrings.watch`. For one that returns whole answers there are
`StopStrings.first_end`, and `StopStrings.occurs_in` to confirm that it stopped for one.

`AnswerTexts`: the text of answers whose tokens arrive little by little, in pieces that are never taken back
and that, joined, are the text of the result. So a piece is held back while its last character may be
incomplete, while it may begin a stop string, and while the tokenizer may still change it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from corelm.spec.records import GenerateRequest, GenerateResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged

_log = logging.getLogger(__name__)

#: Ids to text, with ``skip_special_tokens`` already decided: of one row, and of several.
Decode = Callable[[list[int]], str]
DecodeRows = Callable[[list[list[int]]], Iterable[str]]

#: What an incomplete character decodes to.
HALF_CHARACTER = "\ufffd"
#: As many ids before a text change what it decodes to, unless they have no text, or begin within a character.
_CONTEXT = 16


class LeftContexts:
    """Decodes rows of ids, each after the ids `before` it, for example its prompt; none, to decode it by itself.

    An incomplete character at the end of these other ids counts as text of the row: the row may complete it.
    """

    def __init__(self, decode_rows: DecodeRows, before: Sequence[Sequence[int]]) -> None:
        self._decode_rows = decode_rows
        self._contexts: list[list[int]] = []
        for ids in before:
            self._contexts.append(list(ids[-_CONTEXT:]))
        self._leads = list(decode_rows(self._contexts))
        for row, (ids, lead) in enumerate(zip(before, self._leads, strict=True)):
            if len(ids) > _CONTEXT and (not lead or HALF_CHARACTER in lead):
                self._contexts[row] = list(ids)
                (lead,) = decode_rows([list(ids)])
            self._leads[row] = lead.rstrip(HALF_CHARACTER)

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return what each row adds to the text of the ids before it."""
        joined, found = list[list[int]](), list[str]()
        for ids, row in zip(self._contexts, rows, strict=True):
            joined.append([*ids, *row])
        wholes = self._decode_rows(joined)
        for row, lead, whole in zip(rows, self._leads, wholes, strict=True):
            if not whole.startswith(lead):
                # The decoder has changed the text before, for example a space before a comma.
                lead, (whole,) = "", self._decode_rows([list(row)])
            found.append(whole[len(lead) :] if row else "")
        return found


def decoder_after(decode: Decode, before: Sequence[int]) -> Decode:
    """Return a decoder of ids that follow the ids `before`, which it reads when it is first used."""
    if not before:
        return decode
    contexts: LeftContexts | None = None

    def decode_after(ids: list[int]) -> str:
        nonlocal contexts
        contexts = contexts or LeftContexts(lambda rows: [decode(row) for row in rows], [before])
        return contexts.texts([ids])[0]

    return decode_after


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


def answer_texts(
    batch: GenerateResult, sampling: SamplingParams, tokenizer: Any, prompts: Ragged | None = None
) -> tuple[str, ...]:
    """Return one text per answer: the engine's own, or the decoded ids, without the stop string that ended it.

    `prompts` are the ids, int64, whose text each answer continues, such as its prompt's; None for none.
    """
    texts = batch.texts
    if texts and not sampling.stop:
        return texts
    rows, before = batch.ids.tolist(), None if prompts is None else prompts.tolist()
    # The prompt of a row that failed may be illegal.
    for at, row in enumerate(rows if before is not None else ()):
        if not row and before is not None:
            before[at] = []
    skip = sampling.skip_special_tokens
    if not texts:
        texts = tuple(decoded(tokenizer, rows, skip, before))
    if not sampling.stop:
        return texts
    olds = decoded(tokenizer, [row[:-1] for row in rows], skip, before)
    return tuple(
        text_before_stop(text, old, sampling.stop) if reason == "stop" else text
        for text, old, reason in zip(texts, olds, batch.finish_reasons, strict=True)
    )


# Stop strings ---------------------------------------------------------------------------------------------------------

#: So many ids of space may be between the mark that begins reasoning and the end of a prompt.
_SPACES = 8


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
        reasoning: finds the reasoning of an answer, in which no string counts; None for no such rule.
    """

    stops: tuple[str, ...]
    decode: Decode
    min_new_tokens: int = 0
    reasoning: Reasoning | None = None

    @classmethod
    def of(cls, sampling: SamplingParams, tokenizer: Any) -> StopStrings:
        """Return those of `sampling` in what a ``tokenizer.decode(ids, skip_special_tokens=...)`` returns."""

        def decode(ids: list[int], skip: bool = sampling.skip_special_tokens) -> str:
            text: str = tokenizer.decode(ids, skip_special_tokens=skip)
            return text

        reasoning = None
        if sampling.reasoning_marks and sampling.stop:
            # Marks may be special tokens.
            begin, end = sampling.reasoning_marks
            reasoning = Reasoning(begin, end, partial(decode, skip=False))
        return cls(sampling.stop, decode, sampling.min_new_tokens, reasoning)

    @classmethod
    def of_rows(cls, request: GenerateRequest, tokenizer: Any) -> list[StopStrings]:
        """Return the stop strings of each row of a request."""
        stops = cls.of(request.sampling, tokenizer)
        if not stops.stops:
            return [stops] * len(request.prompts)
        return [stops.after(prompt) for prompt in request.prompts.tolist()]

    def after(self, prompt: Sequence[int]) -> StopStrings:
        """Return the same for answers to a prompt: some decoders drop a space where the ids before it are missing."""
        if not self.stops:
            return self
        reasoning = None if self.reasoning is None else self.reasoning.after(prompt)
        return replace(self, decode=decoder_after(self.decode, prompt), reasoning=reasoning)

    def first_end(self, ids: Sequence[int]) -> int | None:
        """Return the length of the answer up to and including the token that completes the first stop string.

        None if `ids` completes no stop string. Decodes about log2(len(ids)) times.
        """
        least = max(1, self.min_new_tokens)
        if self.stops and self.reasoning is not None:
            least = max(least, self.reasoning.length(ids) + 1)
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
        if self.stops and self.reasoning is not None:
            text = text[len(self.decode(list(ids[: self.reasoning.length(ids)]))) :]
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


@dataclass(frozen=True)
class Reasoning:
    """The reasoning with which an answer begins, or goes on if its prompt ends with the mark that begins it.

    Attributes:
        begin: the text before the reasoning.
        end: the text after it.
        decode: returns the text of some ids, special tokens included.
        begun: whether the prompt has begun it.
    """

    begin: str
    end: str
    decode: Decode
    begun: bool = False

    def after(self, prompt: Sequence[int]) -> Reasoning:
        """Return the same for answers to a prompt."""
        end = self.decode(list(prompt[-len(self.begin.encode()) - _SPACES :])).rstrip()
        return replace(self, begun=end.endswith(self.begin), decode=decoder_after(self.decode, prompt))

    def length(self, ids: Sequence[int]) -> int:
        """Return how many ids at the beginning of an answer are reasoning, and the marks around it."""
        text = self.decode(list(ids))
        end = self._end(text)
        if end is None:
            return len(ids)
        # The text of a longer answer starts with that of a shorter one.
        return bisect_left(range(len(ids)), end, key=lambda length: len(self.decode(list(ids[:length]))))

    def _end(self, text: str) -> int | None:
        """Return where the reasoning in a text ends; None if it goes on."""
        at, begun = 0, self.begun
        # gpt-oss may write several parts.
        while begun or self.begins(text[at:]):
            end = text.find(self.end, at)
            if end < 0:
                return None
            at, begun = end + len(self.end), False
        return at

    def begins(self, text: str) -> bool | None:
        """Return whether a text begins with reasoning; None if that is still open."""
        text, beginnings = text.lstrip(), (self.begin, f"<|start|>assistant{self.begin}")
        if text.startswith(beginnings):
            return True
        return None if any(each.startswith(text) for each in beginnings) else False


class StopStringWatch:
    """Watches one answer grow; made by `StopStrings.watch`.

    It keeps only the latest ids, across which a stop string can stretch, so that each step takes the same time.
    """

    def __init__(self, stop_strings: StopStrings) -> None:
        self._stop_strings = stop_strings
        self._reasoning, self._head = stop_strings.reasoning, list[int]()
        self._end_of_reasoning = self._mark() if self._reasoning is not None and self._reasoning.begun else None
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
        counts = not self._is_reasoning(token) and self._length >= self._stop_strings.min_new_tokens
        before = self._stop_strings.decode(self._tail)
        self._tail.append(token)
        text = self._stop_strings.decode(self._tail)
        if text == before and not text.endswith(HALF_CHARACTER):
            # The token adds no text, so it must not use up the window.
            self._tail.pop()
        del self._tail[: -self._window]
        return counts and self._stop_strings._completed(text, before)

    def _is_reasoning(self, token: int) -> bool:
        """Return whether the next token is of the reasoning, or the mark that ends it."""
        if self._reasoning is None:
            return False
        if self._end_of_reasoning is None:
            self._head.append(token)
            begins = self._reasoning.begins(self._reasoning.decode(self._head))
            if begins:
                self._end_of_reasoning = self._mark()
            elif begins is not None:
                self._reasoning = None
            return bool(begins)
        if self._end_of_reasoning.completed_by(token):
            self._end_of_reasoning, self._head = None, []
        return True

    def _mark(self) -> StopStringWatch:
        assert self._reasoning is not None
        return StopStrings((self._reasoning.end,), self._reasoning.decode).watch()


def skipped_texts(tokenizer: Any) -> frozenset[str]:
    """Return the texts of all tokens that `tokenizer` leaves out with ``skip_special_tokens``.

    These are the special tokens that have a name, of which some tokenizers have only a few, and those that were added.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {token.content for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
    return frozenset(texts - {""})


def stops_without_specials(sampling: SamplingParams, tokenizer: Any) -> tuple[str, ...]:
    """Return the stop strings for which an engine stops at the right token even if it looks for them in a text that
    has the special tokens, and the reasoning. The plugin has to find the others in the ids.
    """
    if sampling.reasoning_marks:
        return ()
    skipped = skipped_texts(tokenizer) if sampling.stop and sampling.skip_special_tokens else ()
    return tuple(stop for stop in sampling.stop if not any(_may_overlap(stop, text) for text in skipped))


def _may_overlap(stop: str, text: str) -> bool:
    """Return whether a place where `stop` occurs may share a character with a place where `text` does."""
    shifted = range(1, min(len(stop), len(text)))
    return stop in text or text in stop or any(stop[:n] == text[-n:] or stop[-n:] == text[:n] for n in shifted)


def text_before_stop(text: str, before: str, stops: Sequence[str]) -> str:
    """Return an answer's `text` up to the first stop string that its last token completed, or all of it.

    One that was complete `before` that token (within ``min_new_tokens``) did not end the answer and stays.

    >>> text_before_stop("a. b. c", "a. b", ["."])
    'a. b'
    """
    found = [at for stop in stops if (at := text.find(stop, _search_start(before, stop))) >= 0]
    return text[: min(found)] if found else text


def _search_start(before: str, stop: str) -> int:
    """The first place where `stop` can begin and still end later than `before` does."""
    # The next token may turn half a character into a whole one, which is then new text.
    return max(0, len(before.rstrip(HALF_CHARACTER)) - len(stop) + 1)


# Streamed texts -------------------------------------------------------------------------------------------------------

#: After this many tokens the beginning of an answer is no longer decoded again with every token. The last few
#: of them are, because a token's text depends on the tokens before it.
_WINDOW, _OVERLAP = 128, 16
#: A tokenizer that cleans spaces up replaces at most so many characters by fewer.
_CLEANED = 4


class AnswerTexts:
    """Makes an `AnswerText` for each answer of a request; the tokenizer is one as `StopStrings.of` takes.

    >>> class Letters:
    ...     def decode(self, ids, skip_special_tokens=True):
    ...         return "".join(chr(97 + i) for i in ids)
    >>> answer = AnswerTexts(SamplingParams(stop=("cd",)), Letters()).answer()
    >>> answer.add([0, 1, 2]), answer.add([2]), answer.add([3], "stop")
    ('ab', 'c', '')
    """

    def __init__(self, sampling: SamplingParams, tokenizer: Any) -> None:
        self.stop_strings = StopStrings.of(sampling, tokenizer)
        # Ids that stand for one byte each. A whole run of them is decoded together.
        self.bytes = _byte_ids(tokenizer)
        self.silent = frozenset(getattr(tokenizer, "all_special_ids", ())) if sampling.skip_special_tokens else ()
        self.cleaned = _CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else 0

    def answer(self, before: Sequence[int] = ()) -> AnswerText:
        """Return the text of an answer to the prompt `before`, if it continues its text; that of a message does not."""
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
