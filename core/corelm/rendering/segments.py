"""The segments of a rendered conversation: text from the template, literal text, and the ids of sampled turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from corelm.errors import TemplateError
from corelm.rendering.assistant_spans import AssistantSpans, Span
from corelm.rendering.template import Marks, Template, json_escape, map_strings, read_marks, with_placeholder
from corelm.spec.message import Chat, Message
from corelm.validate import unencodable


class Segment(NamedTuple):
    """A stretch of a conversation: text to tokenize separately, or a sampled turn that already has its ids.

    Attributes:
        text: the segment as text.
        ids: the ids of a sampled turn; None for text that is still to be tokenized.
        literal: True if the text of a special token is to be read as ordinary characters.
        spans: ``[start, stop)`` of the assistant's characters in the text, ascending.
        after: the last id of the sampled turn that directly precedes this segment.
    """

    text: str
    ids: tuple[int, ...] | None = None
    literal: bool = False
    spans: tuple[Span, ...] = ()
    after: int | None = None


class RenderPlan(NamedTuple):
    """A conversation as the template receives it, with placeholders for sampled turns and typed special tokens.

    Attributes:
        chat: the conversation.
        messages: its messages for the template, placeholders in them.
        sampled: indices of the sampled turns.
        typed_specials: the special tokens that messages contain as text, in the order of their placeholders.
        stops: the turns up to which the conversation is rendered, in order; None renders all of it.
        renderings: maps a stop to its text, for the stops that are already rendered.
    """

    chat: Chat
    messages: list[dict[str, Any]]
    sampled: Sequence[int]
    typed_specials: Sequence[str]
    stops: Sequence[int | None]
    renderings: dict[int | None, str]


class Segmenter:
    """Cuts conversations into segments, all with the same template and settings.

    Args:
        contents: every text in the messages of all conversations, joined.
        special_texts: the texts of the tokenizer's special tokens.
        eos_texts: the texts that end a turn.
    """

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
        self.reads_marks = want_assistant and template.marks_assistant
        self.compares_renderings = want_assistant and not self.reads_marks
        self.template = template.with_marks(marks if self.reads_marks else None)
        self.assistant_spans = AssistantSpans(self.template, partial(self._placeholder, "Turn"), eos_texts)
        self.add_generation_prompt = add_generation_prompt
        self.prefer_tokens = prefer_tokens
        self._special = re.compile("|".join(map(re.escape, sorted(special_texts, key=len, reverse=True))) or "(?!)")
        # Most batches contain none, and then the messages need not be searched one by one.
        self._has_typed_specials = self._special.search(contents) is not None
        self._escaped_slot = json_escape(marks.slot)
        # The names have letters of both cases, so that a filter such as `upper` visibly alters a placeholder.
        self._placeholders = re.compile(f"{marks.slot}(Turn|Text)([0-9]+){marks.slot}")

    def prepare(self, chats: Sequence[Chat], messages: Sequence[list[dict[str, Any]]]) -> list[RenderPlan]:
        """Return a plan for each conversation, given its messages for the template; `segments` takes the plans."""
        plans = list(map(self._plan, chats, messages))
        for prompt in (False, True):
            jobs = [(plan, stop) for plan in plans for stop in plan.stops if self._wants_prompt(stop) is prompt]
            texts = self.template.render_all([plan.messages[:stop] for plan, stop in jobs], prompt) or ()
            for (plan, stop), text in zip(jobs, texts, strict=False):
                plan.renderings[stop] = text
        return plans

    def segments(self, plan: RenderPlan) -> list[Segment]:
        """Return the segments of a conversation, in order.

        Raises:
            TemplateError: the template fails, loses a sampled turn, or does not tell which text is the assistant's.
        """
        segments: list[Segment] = []
        previous = None
        for stop in plan.stops:
            between = self._segments_between(plan, previous, stop)
            for segment in between:
                if what := unencodable(segment.text):
                    raise TemplateError(f"the chat template writes text that cannot be encoded: {what}")
            segments += between
            if stop is not None:
                turn = plan.chat[stop]
                segments.append(Segment(self._sampled_text(turn), ids=turn.token_ids))
            previous = stop
        return segments

    def _plan(self, chat: Chat, messages: list[dict[str, Any]]) -> RenderPlan:
        sampled = [turn for turn, message in enumerate(chat) if self.prefer_tokens and message.token_ids is not None]
        if not sampled and not self._has_typed_specials:
            # The common case.
            return RenderPlan(chat, messages, (), (), (None,), {})
        typed_specials: list[str] = []

        def replace(special: re.Match[str]) -> str:
            typed_specials.append(special[0])
            return self._placeholder("Text", len(typed_specials) - 1)

        messages = list(messages)
        for turn in sampled:
            messages[turn] = with_placeholder(messages[turn], self._placeholder("Turn", turn))
        if self._has_typed_specials:
            messages = map_strings(messages, lambda text: self._special.sub(replace, text))
        # Text before a sampled turn is rendered as it was in that turn's prompt; text after the last sampled turn is
        # rendered from all messages.
        ends_sampled = bool(sampled) and sampled[-1] == len(chat) - 1
        stops = [*sampled, *([] if ends_sampled and not self.add_generation_prompt else [None])]
        return RenderPlan(chat, messages, sampled, typed_specials, stops, {})

    def _wants_prompt(self, stop: int | None) -> bool:
        """Return whether a rendering up to `stop` ends with the generation prompt."""
        return stop is not None or self.add_generation_prompt

    def _segments_between(self, plan: RenderPlan, previous: int | None, stop: int | None) -> list[Segment]:
        """Return what the template writes after the sampled turn `previous` when it prompts for the turn `stop`."""
        text, spans = self._render(plan, previous, stop)
        at, after = 0, None
        if previous is not None:
            placeholder = self._placeholder("Turn", previous)
            at = text.index(placeholder) + len(placeholder)
            # Only the ids of a sampled turn are the assistant's, not what the template writes around them.
            spans = [span for span in spans if span[0] >= at]
            ids = plan.chat[previous].token_ids
            after = ids[-1] if ids else None
        if not plan.typed_specials:
            # No other placeholder comes after `at`.
            return [Segment(text[at:], spans=_clip(spans, at, len(text)), after=after)]
        segments = []
        for found in self._placeholders.finditer(text, at):
            segments.append(Segment(text[at : found.start()], spans=_clip(spans, at, found.start()), after=after))
            inside = bool(_clip(spans, *found.span()))
            special = plan.typed_specials[int(found[2])]
            segments.append(Segment(special, literal=True, spans=((0, len(special)),) if inside else ()))
            at, after = found.end(), None
        return [*segments, Segment(text[at:], spans=_clip(spans, at, len(text)), after=after)]

    def _render(self, plan: RenderPlan, previous: int | None, stop: int | None) -> tuple[str, list[Span]]:
        """Render the messages before `stop`, or all of them. Return the text and the assistant's characters in it.

        The characters are those after the turn `previous`.
        """
        text = plan.renderings.get(stop)
        if text is None:
            text = self.template(plan.messages[:stop], self._wants_prompt(stop))
        spans: list[Span] = []
        if self.reads_marks:
            text, spans = read_marks(text, self.marks)
        self._check_placeholders(text, plan.sampled if stop is None else [turn for turn in plan.sampled if turn < stop])
        if self.compares_renderings:
            messages, prompt = plan.messages[:stop], self._wants_prompt(stop)
            first = 0 if previous is None else previous + 1
            turns = [turn for turn in range(first, len(messages)) if messages[turn]["role"] == "assistant"]
            spans = self.assistant_spans.find(messages, prompt, text, turns)
        return text, spans

    def _check_placeholders(self, text: str, sampled: Sequence[int]) -> None:
        """Check that every sampled turn occurs once and in order, and that no placeholder was altered."""
        if not sampled and self.marks.slot not in text and self._escaped_slot not in text:
            return
        found = [int(slot[2]) for slot in self._placeholders.finditer(text) if slot[1] == "Turn"]
        rest = self._placeholders.sub("", text)
        altered = self.marks.slot in rest or self._escaped_slot in rest
        if found != list(sampled):
            lost = [turn for turn in sampled if found.count(turn) != 1]
            what = f"drops, repeats or alters message {lost[0]}" if lost else "writes messages in another order"
            raise TemplateError(
                f"the chat template {what}, so the sampled ids of the conversation cannot be put back; pass a "
                "chat_template= that writes contents unchanged, or prefer_tokens=False to render sampled turns from "
                "their text"
            )
        if altered:
            raise TemplateError(
                "the chat template alters the contents of messages, and a message contains the text of a special "
                "token, which could then become that token; pass a chat_template= that writes contents unchanged, or "
                "change the text of the message"
            )

    def _placeholder(self, kind: str, number: int) -> str:
        return f"{self.marks.slot}{kind}{number}{self.marks.slot}"

    def _sampled_text(self, turn: Message) -> str:
        """Return the text of a sampled turn.

        The ids are decoded if the output was parsed (into tool calls or thinking): the content then lacks a part of it.
        """
        if turn.content is None or turn.tool_calls or turn.extra:
            return str(self.template.tokenizer.decode(list(turn.token_ids or ()), skip_special_tokens=True))
        return turn.content


def _clip(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Return the parts of `spans` inside ``[start, stop)``, counted from `start`."""
    if not spans:
        return ()
    if not start and spans[-1][1] <= stop:
        # The case of a conversation that is one segment.
        return tuple([span for span in spans if span[0] < span[1]])
    return tuple([(max(a, start) - start, min(b, stop) - start) for a, b in spans if a < stop and b > start and a < b])


def special_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Map the id of every special token to its text. Empty for a tokenizer that does not list them."""
    named = zip(getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=True)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {**dict(named), **{token_id: token.content for token_id, token in added.items() if token.special}}
