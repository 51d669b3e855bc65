"""The segments of a rendered conversation: the template's text, literal texts, and the ids of sampled turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from corelm.errors import TemplateError
from corelm.rendering.assistant_spans import AssistantSpans, Span
from corelm.rendering.template import Marks, Template, escaped, map_strings, read_marks, stand_in
from corelm.spec.message import Chat, Message


class Segment(NamedTuple):
    """A stretch of a conversation that is tokenized by itself, or that has its ids already.

    Attributes:
        text: the segment in words.
        ids: of a sampled turn; None for text that is still to be tokenized.
        literal: no special token is read in the text.
        spans: ``[start, stop)`` characters of the text that are the assistant's, ascending.
        after: the last id of the sampled turn right before this segment.
    """

    text: str
    ids: tuple[int, ...] | None = None
    literal: bool = False
    spans: tuple[Span, ...] = ()
    after: int | None = None


class RenderPlan(NamedTuple):
    """A conversation as the template gets it: placeholders for sampled turns and for the texts of special tokens.

    Attributes:
        stops: the turns that it is rendered up to; None is all of it.
        renderings: stop → text, where it has been rendered.
    """

    chat: Chat
    messages: list[dict[str, Any]]
    sampled: Sequence[int]
    literals: Sequence[str]
    stops: Sequence[int | None]
    renderings: dict[int | None, str]


class Segmenter:
    """Cuts conversations into segments, all with the same template and settings. `contents` is all that they say."""

    def __init__(
        self,
        template: Template,
        marks: Marks,
        *,
        contents: str,
        special_texts: Sequence[str],
        eos_texts: Sequence[str],
        add_generation_prompt: bool,
        prefer_tokens: bool,
        want_assistant: bool,
    ) -> None:
        self.marks = marks
        self.marked = want_assistant and template.marks_assistant
        self.by_prefix = want_assistant and not self.marked
        self.template = template.with_marks(marks if self.marked else None)
        self.turns = AssistantSpans(self.template, partial(self._slot, "Turn"), eos_texts)
        self.add_generation_prompt = add_generation_prompt
        self.prefer_tokens = prefer_tokens
        self._special = re.compile("|".join(map(re.escape, sorted(special_texts, key=len, reverse=True))) or "(?!)")
        # Most batches have none, and then no message need be searched.
        self._specials_typed = self._special.search(contents) is not None
        self._escaped = escaped(marks.slot)
        # Letters of both cases inside, so that a filter which changes a text is seen to have done so.
        self._placeholder = re.compile(f"{marks.slot}(Turn|Text)([0-9]+){marks.slot}")

    def plans(self, chats: Sequence[Chat], messages: Sequence[list[dict[str, Any]]]) -> list[RenderPlan]:
        """Conversations with their messages as the template gets them, made ready for `segments`."""
        plans = list(map(self._plan, chats, messages))
        for prompt in (False, True):
            jobs = [(one, stop) for one in plans for stop in one.stops if self._asks(stop) is prompt]
            texts = self.template.every([plan.messages[:stop] for plan, stop in jobs], prompt) or ()
            for (plan, stop), text in zip(jobs, texts, strict=False):
                plan.renderings[stop] = text
        return plans

    def segments(self, plan: RenderPlan) -> list[Segment]:
        """The conversation, segment by segment.

        Raises:
            TemplateError: the template fails, loses a sampled turn, or cannot say what is the assistant's.
        """
        segments: list[Segment] = []
        previous = None
        for stop in plan.stops:
            segments += self._cut(plan, previous, stop)
            if stop is not None:
                said = plan.chat[stop]
                segments.append(Segment(self._said(said), ids=said.token_ids))
            previous = stop
        return segments

    def _plan(self, chat: Chat, messages: list[dict[str, Any]]) -> RenderPlan:
        sampled = [turn for turn, message in enumerate(chat) if self.prefer_tokens and message.token_ids is not None]
        if not sampled and not self._specials_typed:
            # As most are.
            return RenderPlan(chat, messages, (), (), (None,), {})
        literals: list[str] = []

        def keep(special: re.Match[str]) -> str:
            literals.append(special[0])
            return self._slot("Text", len(literals) - 1)

        messages = list(messages)
        for turn in sampled:
            messages[turn] = stand_in(messages[turn], self._slot("Turn", turn))
        if self._specials_typed:
            messages = map_strings(messages, lambda text: self._special.sub(keep, text))
        # What stands before a sampled turn is rendered as its prompt was; what follows the last one, as things are now.
        ends_sampled = bool(sampled) and sampled[-1] == len(chat) - 1
        stops = [*sampled, *([] if ends_sampled and not self.add_generation_prompt else [None])]
        return RenderPlan(chat, messages, sampled, literals, stops, {})

    def _asks(self, stop: int | None) -> bool:
        """Whether a rendering up to `stop` ends with the generation prompt."""
        return stop is not None or self.add_generation_prompt

    def _cut(self, plan: RenderPlan, previous: int | None, stop: int | None) -> list[Segment]:
        """What the template writes after the sampled turn `previous` when it asks for turn `stop`."""
        text, spans = self._rendered(plan, previous, stop)
        at, after = 0, None
        if previous is not None:
            placeholder = self._slot("Turn", previous)
            at = text.index(placeholder) + len(placeholder)
            # Of a sampled turn only the ids are the assistant's, not what the template writes around them.
            spans = [span for span in spans if span[0] >= at]
            ids = plan.chat[previous].token_ids
            after = ids[-1] if ids else None
        if not plan.literals:
            # No other placeholder comes after `at`.
            return [Segment(text[at:], spans=_within(spans, at, len(text)), after=after)]
        segments = []
        for found in self._placeholder.finditer(text, at):
            segments.append(Segment(text[at : found.start()], spans=_within(spans, at, found.start()), after=after))
            inside = bool(_within(spans, *found.span()))
            literal = plan.literals[int(found[2])]
            segments.append(Segment(literal, literal=True, spans=((0, len(literal)),) if inside else ()))
            at, after = found.end(), None
        return [*segments, Segment(text[at:], spans=_within(spans, at, len(text)), after=after)]

    def _rendered(self, plan: RenderPlan, previous: int | None, stop: int | None) -> tuple[str, list[Span]]:
        """The messages before `stop`, or all of them, and the assistant's characters after the turn `previous`."""
        text = plan.renderings.get(stop)
        if text is None:
            text = self.template(plan.messages[:stop], self._asks(stop))
        spans: list[Span] = []
        if self.marked:
            text, spans = read_marks(text, self.marks)
        self._check(text, plan.sampled if stop is None else [turn for turn in plan.sampled if turn < stop])
        if self.by_prefix:
            messages, prompt = plan.messages[:stop], self._asks(stop)
            first = 0 if previous is None else previous + 1
            turns = [turn for turn in range(first, len(messages)) if messages[turn]["role"] == "assistant"]
            spans = self.turns.find(messages, prompt, text, turns)
        return text, spans

    def _check(self, text: str, sampled: Sequence[int]) -> None:
        """Every sampled turn is there once and in order, and no placeholder was altered."""
        if not sampled and self.marks.slot not in text and self._escaped not in text:
            return
        found = [int(slot[2]) for slot in self._placeholder.finditer(text) if slot[1] == "Turn"]
        rest = self._placeholder.sub("", text)
        altered = self.marks.slot in rest or self._escaped in rest
        if found != list(sampled):
            lost = [turn for turn in sampled if found.count(turn) != 1]
            what = f"drops, repeats or alters message {lost[0]}" if lost else "writes messages in another order"
            raise TemplateError(
                f"the chat template {what}, so that the ids sampled for it cannot take its place; pass chat_template= "
                "that writes contents as they are, or prefer_tokens=False to render sampled turns from their text"
            )
        if altered:
            raise TemplateError(
                "the chat template alters the contents of messages, and one holds the text of a special token, which "
                "then could not be kept from becoming one; pass a chat_template= that writes contents as they are, or "
                "change the text"
            )

    def _slot(self, kind: str, number: int) -> str:
        return f"{self.marks.slot}{kind}{number}{self.marks.slot}"

    def _said(self, message: Message) -> str:
        """A sampled turn in words; one that was parsed no longer holds all of them in its content."""
        if message.content is None or message.tool_calls or message.extra:
            return str(self.template.tokenizer.decode(list(message.token_ids or ()), skip_special_tokens=True))
        return message.content


def _within(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """The parts of `spans` inside ``[start, stop)``, counted from `start`."""
    if not spans:
        return ()
    if not start and spans[-1][1] <= stop:
        # As where a conversation is one segment.
        return tuple([span for span in spans if span[0] < span[1]])
    return tuple([(max(a, start) - start, min(b, stop) - start) for a, b in spans if a < stop and b > start and a < b])


def special_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Id → text of every special token. A tokenizer that does not tell, as a plain callable, has none."""
    named = zip(getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=True)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {**dict(named), **{token_id: token.content for token_id, token in added.items() if token.special}}
