"""The segments of a rendered conversation: text from the template, literal text, and the ids of sampled turns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from corelm.rendering.layout import Layout, Span, Writer
from corelm.rendering.template import Marks, Template, map_strings
from corelm.spec.message import Chat, Message
from corelm.validate import nested_texts

#: How many characters of conversations are remembered for a template before all are forgotten.
_REMEMBERED = 2**27
#: For how many templates, each with its variables, a tokenizer's conversations are remembered.
_MOST_SETTINGS = 4096


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


@dataclass(slots=True)
class _Prefix:
    """The first messages of conversations, and what is known of the prompt that ends with them.

    Attributes:
        longer: prefixes of one message more, by what that message says.
        between: the segments from the sampled turn before, or from the beginning, to the end of the prompt for a turn
            that was sampled next, by how that turn was begun.
        answers: the texts of turns that were sampled next, by their ids.
        size: for no messages at all, the number of characters in all prefixes.
    """

    longer: dict[Any, _Prefix] = field(default_factory=dict)
    between: dict[str | None, list[Segment]] = field(default_factory=dict)
    answers: dict[tuple[int, ...], str] = field(default_factory=dict)
    size: int = 0


class _Sampled(NamedTuple):
    """A sampled turn: its number, the text of its prompt, and its own text with special tokens."""

    number: int
    before: str
    text: str


#: For each tokenizer, the prompts that it wrote, by template and settings. Without them each prompt of a long rollout
#: would render all the prompts before it.
_known: WeakKeyDictionary[Any, dict[Any, _Prefix]] = WeakKeyDictionary()


class Segmenter:
    """Cuts conversations into segments, all with the same template and settings.

    Args:
        template: renders them.
        marks: characters that no message contains.
        contents: every text in the messages of all conversations, joined.
        specials: the special tokens of the tokenizer.
        eos_ids: the ids that end a turn.
    """

    def __init__(
        self,
        template: Template,
        marks: Marks,
        *,
        contents: str,
        specials: Mapping[int, str],
        eos_ids: Collection[int],
        add_generation_prompt: bool,
        continue_final_message: bool,
        prefer_tokens: bool,
        want_assistant: bool,
    ) -> None:
        texts = sorted(filter(None, specials.values()), key=len, reverse=True)
        special = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        eos_texts = [text for eos in sorted(eos_ids) if (text := template.tokenizer.decode([eos]))]
        self._root = _remembered(template, (want_assistant, *sorted(eos_ids), *sorted(specials.items())))
        self._special, self._slot = special, marks.slot
        # Most batches contain none, and then the messages need not be searched one by one.
        self._has_typed_specials = special.search(contents) is not None
        self._typed: list[str] = []
        tools = template.kwargs.get("tools")
        if any(map(special.search, nested_texts("template_kwargs", tools))):
            template = replace(template, kwargs={**template.kwargs, "tools": self._with_slots(tools, self._typed)})
        self._writer = Writer(template, marks, special, eos_texts, wants_masks=want_assistant)
        self._tokenizer = template.tokenizer
        self._end_ids = {*eos_ids, *specials}
        self._prompt = add_generation_prompt
        self._continues = continue_final_message
        self._prefer_tokens = prefer_tokens
        self._wants_masks = want_assistant

    def segments(self, chats: Sequence[Chat], messages: Sequence[list[dict[str, Any]]]) -> list[Iterator[Segment]]:
        """Return the segments of each conversation, given its messages for the template.

        Iterating raises TemplateError: the template fails or does not show where a turn is.
        """
        plans = [self._plan(each) for each in messages]
        # One call renders many conversations in half the time.
        whole = [row for row, chat in enumerate(chats) if self._prompt or not (chat and self._is_sampled(chat[-1]))]
        texts = self._writer.template.render_all([plans[row][0] for row in whole], self._prompt) or ()
        raw = dict(zip(whole, texts, strict=False))
        return [self._cut(chat, *plans[row], raw.get(row)) for row, chat in enumerate(chats)]

    def _is_sampled(self, message: Message) -> bool:
        return self._prefer_tokens and message.token_ids is not None

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
            return f"{self._slot}Text{len(typed) - 1}{self._slot}"

        return map_strings(value, lambda text: self._special.sub(slot, text))

    def _cut(
        self, chat: Chat, messages: list[dict[str, Any]], typed: Sequence[str], raw: str | None
    ) -> Iterator[Segment]:
        prefix, before = self._root, ""
        previous: _Sampled | None = None
        for number, message in enumerate(chat):
            if self._is_sampled(message):
                begun = None if message.begun is None else repr(message.begun)
                if begun not in prefix.between:
                    prefix.between[begun] = [*self._prompt_of(chat, messages, typed, number, previous)]
                    self._root.size += sum(len(segment.text) for segment in prefix.between[begun])
                yield from prefix.between[begun]
                before += "".join(segment.text for segment in prefix.between[begun])
                ids = message.token_ids or ()
                if ids not in prefix.answers:
                    prefix.answers[ids] = self._decoded(ids)
                    self._root.size += len(ids)
                previous = _Sampled(number, before, prefix.answers[ids])
                before += previous.text
                yield Segment(previous.text, ids=ids)
            key = _key(message)
            if key not in prefix.longer:
                prefix.longer[key] = _Prefix()
                self._root.size += len(message.content or "")
            prefix = prefix.longer[key]
        if self._prompt or previous is None or previous.number + 1 < len(chat):
            layout = Layout(self._writer, messages, self._prompt, typed, raw)
            rest = [*self._after(layout, chat, previous, layout.beginning() if self._continues else None)]
            if self._prompt:
                # The next turn is sampled from this prompt.
                prefix.between[None] = rest
            yield from rest

    def _decoded(self, ids: Sequence[int]) -> str:
        try:
            return str(self._tokenizer.decode(list(ids)))
        except Exception:
            # Ids that no token has are refused later, by row.
            return ""

    def _prompt_of(
        self,
        chat: Chat,
        messages: Sequence[dict[str, Any]],
        typed: Sequence[str],
        number: int,
        previous: _Sampled | None,
    ) -> Iterator[Segment]:
        """Yield the end of the prompt that a turn was sampled from, after the sampled turn before it."""
        given = chat[number].begun
        if given is None:
            yield from self._after(Layout(self._writer, messages[:number], True, typed), chat, previous)
            return
        begun, typed = self._plan([Message.from_dict(given).for_template()], typed)
        layout = Layout(self._writer, [*messages[:number], *begun], False, typed)
        yield from self._after(layout, chat, previous, layout.beginning())

    def _after(
        self, layout: Layout, chat: Chat, previous: _Sampled | None, stop: int | None = None
    ) -> Iterator[Segment]:
        """Yield what the template writes after a sampled turn, or all of it.

        Args:
            layout: the conversation up to the next sampled turn.
            stop: where the text is cut; None for nowhere.
        """
        text, literals, spans, _ = layout.written
        start = first = 0
        if previous is not None:
            first = previous.number + 1
            start, ended = self._end_of(layout, chat[previous.number], previous)
            # Around a sampled turn, the template's words are not the assistant's.
            spans = [span for span in spans if span[0] > start or (ended and span[0] == start)]
        if self._wants_masks and not self._writer.reads_marks:
            given = [at for at in range(first, len(layout.messages)) if layout.messages[at]["role"] == "assistant"]
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
        while kept and ids[kept - 1] in self._end_ids:
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


def _remembered(template: Template, settings: Any) -> _Prefix:
    """Return what is known of the prompts of a template with these settings."""
    try:
        known = _known.setdefault(template.tokenizer, {})
    except TypeError:
        return _Prefix()
    key = template.source, repr(template.kwargs), settings
    # Conversations with tools of their own have a key each.
    if key not in known and (len(known) >= _MOST_SETTINGS or sum(each.size for each in known.values()) > _REMEMBERED):
        known.clear()
    if key not in known or known[key].size > _REMEMBERED:
        known[key] = _Prefix()
    return known[key]


def _key(message: Message) -> Any:
    calls = repr(message.tool_calls) if message.tool_calls else None
    extra = repr(message.extra) if message.extra else None
    begun = repr(message.begun) if message.begun else None
    return message.role, message.content, calls, message.tool_call_id, message.name, message.token_ids, begun, extra
