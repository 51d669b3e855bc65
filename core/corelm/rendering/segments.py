"""The segments of a rendered conversation: text from the template, literal text, and the ids of sampled turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from corelm.errors import TemplateError
from corelm.rendering.layout import Layout, Span, Writer
from corelm.rendering.template import Marks, Template, map_strings
from corelm.spec.message import Chat, Message
from corelm.validate import nested_texts


class Segment(NamedTuple):
    """A stretch of a conversation: text to tokenize separately, or a sampled turn that already has its ids.

    Attributes:
        text: the segment as text.
        ids: the ids of a sampled turn; None for text that is still to be tokenized.
        literal: True if the text of a special token is to be read as ordinary characters.
        spans: ``[start, stop)`` of the assistant's characters in the text, ascending.
    """

    text: str
    ids: tuple[int, ...] | None = None
    literal: bool = False
    spans: tuple[Span, ...] = ()


class Memory:
    """What was made for each of some objects, as long as they live. All is forgotten once it is too much.

    Args:
        most: how much is too much, in what the caller counts.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._of: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def of(self, owner: Any) -> dict[Any, Any]:
        """Return what was made for an object, a dict to add to."""
        try:
            return self._of.setdefault(owner, {})
        except TypeError:  # it cannot be referenced weakly
            return {}

    def grow(self, size: int) -> None:
        """Count what was added."""
        self._size += size
        if self._size > self._most:
            self._size = 0
            self._of.clear()


#: For each tokenizer, what it wrote for turns that were sampled, so that a long rollout does not render all its prompts
#: for each new one. It holds numbers for beginnings of conversations, by that of the beginning one message shorter and
#: by that message; segments, by the beginning that a turn was sampled after and how that turn was begun; and texts, by
#: the ids that were sampled. Characters are counted.
_memory = Memory(2**27)
_numbers = count()


class _Sampled(NamedTuple):
    """A sampled turn: its number, the text of its prompt, and its own text with special tokens."""

    number: int
    before: str
    text: str


@dataclass(kw_only=True)
class Segmenter:
    """Cuts conversations into segments, all with the same template and settings.

    Attributes:
        template: renders them.
        marks: characters that no message contains.
        contents: every text in the messages of all conversations, joined.
        specials: the special tokens of the tokenizer.

    The others are arguments of `render`.
    """

    template: Template
    marks: Marks
    contents: str
    specials: Mapping[int, str]
    eos_ids: Collection[int]
    add_generation_prompt: bool
    continue_final_message: bool
    prefer_tokens: bool
    want_assistant: bool

    def __post_init__(self) -> None:
        template, specials, eos_ids = self.template, self.specials, self.eos_ids
        texts = sorted(filter(None, specials.values()), key=len, reverse=True)
        special = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        eos_texts = [text for eos in sorted(eos_ids) if (text := template.tokenizer.decode([eos]))]
        self._known = _memory.of(template.tokenizer)
        settings = self.want_assistant, *sorted(eos_ids), *sorted(specials.items())
        self._root = self._remembered((template.source, repr(template.kwargs), settings), partial(next, _numbers))
        self._special = special
        # Most batches contain none, and then the messages need not be searched one by one.
        self._has_typed_specials = special.search(self.contents) is not None
        self._typed: list[str] = []
        tools = template.kwargs.get("tools")
        if any(map(special.search, nested_texts("template_kwargs", tools))):
            template = replace(template, kwargs={**template.kwargs, "tools": self._with_slots(tools, self._typed)})
        self._writer = Writer(template, self.marks, special, eos_texts, wants_masks=self.want_assistant)

    def segments(self, chats: Sequence[Chat], messages: Sequence[list[dict[str, Any]]]) -> list[Iterator[Segment]]:
        """Return the segments of each conversation, given its messages for the template.

        Iterating raises TemplateError: the template fails or does not show where a turn is.
        """
        plans = [self._plan(each) for each in messages]
        # One call renders many conversations in half the time.
        whole = [
            row
            for row, chat in enumerate(chats)
            if self.add_generation_prompt or not (chat and self._is_sampled(chat[-1]))
        ]
        texts = self._writer.template.render_all([plans[row][0] for row in whole], self.add_generation_prompt) or ()
        raw = dict(zip(whole, texts, strict=False))
        return [self._cut(chat, *plans[row], raw.get(row)) for row, chat in enumerate(chats)]

    def _is_sampled(self, message: Message) -> bool:
        return self.prefer_tokens and message.token_ids is not None

    def _plan(
        self, messages: list[dict[str, Any]], known: Sequence[str] | None = None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return messages with slots for the special tokens that users typed, and these special tokens.

        Args:
            known: special tokens that have slots in other messages.
        """
        typed = [*(self._typed if known is None else known)]
        return (self._with_slots(messages, typed) if self._has_typed_specials else messages), typed

    def _with_slots(self, value: Any, typed: list[str]) -> Any:
        """Return nested texts with slots for special tokens, which are added to `typed`."""

        def slot(special: re.Match[str]) -> str:
            typed.append(special[0])
            return f"{self.marks.slot}Text{len(typed) - 1}{self.marks.slot}"

        return map_strings(value, lambda text: self._special.sub(slot, text))

    def _remembered(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            made = self._known.setdefault(key, make())
            _memory.grow(len(repr((key, made))))
        return self._known[key]

    def _cut(
        self, chat: Chat, messages: list[dict[str, Any]], typed: Sequence[str], raw: str | None
    ) -> Iterator[Segment]:
        beginning, before = self._root, ""
        previous: _Sampled | None = None

        def prompt(number: int) -> list[Segment]:
            layout, stop = self._prompt_for(chat, messages, typed, raw, number)
            return [*self._after(layout, chat, previous, number, stop)]

        for number, message in enumerate(chat):
            if self._is_sampled(message):
                part = self._remembered((beginning, repr(message.begun)), partial(prompt, number))
                ids = message.token_ids or ()
                before += "".join(segment.text for segment in part)
                previous = _Sampled(number, before, self._remembered(("text", ids), partial(self._decoded, ids)))
                before += previous.text
                yield from [*part, Segment(previous.text, ids=ids)]
            beginning = self._remembered((beginning, *_key(message)), partial(next, _numbers))
        if self.add_generation_prompt:
            # The next turn may be sampled from this prompt.
            yield from self._remembered((beginning, repr(None)), partial(prompt, len(chat)))
        elif previous is None or previous.number + 1 < len(chat):
            yield from prompt(len(chat))

    def _decoded(self, ids: Sequence[int]) -> str:
        try:
            return str(self.template.tokenizer.decode(list(ids)))
        except Exception:
            # Ids that no token has are refused later, by row.
            return ""

    def _prompt_for(
        self, chat: Chat, messages: Sequence[dict[str, Any]], typed: Sequence[str], raw: str | None, number: int
    ) -> tuple[Layout, int | None]:
        """Render what a turn is sampled after. Return it and where it is cut, None for nowhere.

        Args:
            raw: the rendering of all messages, if it was made before.
            number: that of the turn.
        """
        if number == len(chat):
            layout = Layout(self._writer, messages, self.add_generation_prompt, typed, raw)
            return layout, layout.beginning() if self.continue_final_message else None
        begun = chat[number].begun
        try:
            if begun is None:
                return Layout(self._writer, messages[:number], True, typed), None
            given, typed = self._plan([Message.from_dict(begun).for_template()], typed)
            layout = Layout(self._writer, [*messages[:number], *given], False, typed)
            return layout, layout.beginning()
        except TemplateError as error:
            raise TemplateError(
                f"message {number}: the prompt that it was sampled from cannot be rendered: {error}; pass "
                "prefer_tokens=False to render its text instead"
            ) from error.__cause__

    def _after(
        self,
        layout: Layout,
        chat: Chat,
        previous: _Sampled | None,
        number: int,
        stop: int | None,
    ) -> Iterator[Segment]:
        """Yield what the template writes between a sampled turn, or the beginning, and another turn.

        Args:
            layout: a conversation that has both.
            number: that of the other turn.
            stop: where the text is cut; None for nowhere.
        """
        text, literals, spans, _ = layout.written
        start = first = 0
        if previous is not None:
            first = previous.number + 1
            start, ended = self._end_of(layout, chat[previous.number], previous)
            missing = "" if ended else layout.end_of_thinking(previous.before, previous.text)
            if not text.startswith(missing, start):
                yield Segment(missing)
            # Around a sampled turn, the template's words are not the assistant's.
            spans = [span for span in spans if span[0] > start or (ended and span[0] == start)]
        if stop is not None and stop < start:
            raise TemplateError(f"message {number}: the chat template does not write the turns in order")
        if self.want_assistant and not self._writer.reads_marks:
            given = [
                at
                for at in range(first, min(number, len(layout.messages)))
                if layout.messages[at]["role"] == "assistant"
            ]
            spans = [(turn.start, turn.stop) for turn in map(layout.turn, given)]
        text = text[:stop]
        literals = [span for span in literals if start <= span[0] < len(text)]
        edges = [start, *chain.from_iterable(literals), len(text)]
        for at, (begin, end) in enumerate(pairwise(edges)):
            if begin < end:
                literal, inside = at % 2 == 1, _clip(spans, begin, end)
                # A special token that was typed is in a mask as a whole.
                inside = ((0, end - begin),) if literal and inside else inside
                yield Segment(text[begin:end], literal=literal, spans=inside)

    def _end_of(self, layout: Layout, message: Message, sampled: _Sampled) -> tuple[int, bool]:
        """Return where a sampled turn ends in the text, and whether it has an end marker: that is not written again."""
        ids, text = message.token_ids or (), layout.written.text
        kept = len(ids)
        while kept and (ids[kept - 1] in self.eos_ids or ids[kept - 1] in self.specials):
            kept -= 1
        end = self._decoded(ids[kept:])
        said, content = sampled.before + sampled.text, message.content or ""
        # The content may have been edited since, or hold the characters of the end marker.
        whole = not content.endswith(end) if end else content.strip() in sampled.text
        if whole and (end or content.strip() or message.tool_calls or message.extra) and text.startswith(said):
            return len(said), bool(end)
        turn = layout.turn(sampled.number, sampled=True)
        return (turn.stop, True) if end else (turn.end, False)


def special_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Map the id of every special token to its text. Empty for a tokenizer that does not list them."""
    named = zip(getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=True)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {**dict(named), **{token_id: token.content for token_id, token in added.items() if token.special}}


def _clip(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Return the parts of `spans` inside ``[start, stop)``, counted from `start`."""
    return tuple((max(a, start) - start, min(b, stop) - start) for a, b in spans if a < stop and b > start and a < b)


def _key(message: Message) -> Any:
    """Return what tells messages apart. Texts and ids are compared fast, and dicts cannot be hashed."""
    more = repr((message.tool_calls, message.begun, message.extra))
    return message.role, message.content, message.tool_call_id, message.name, message.token_ids, more
