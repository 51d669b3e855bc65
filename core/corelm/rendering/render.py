"""Conversations to token ids, without changing an id that was sampled.

The template writes the whole conversation, with all that its messages say. If that text begins with the prompt of the
last sampled turn and what was sampled, the new prompt is the ids of that prompt, the sampled ids, and the tokenized
rest of the text::

    prompt(turn 2) = prompt(turn 1) + ids(turn 1) + what the template writes after turn 1

The text may begin otherwise: a template may drop the thinking of a past turn, or write calls in its own form. Then the
rest begins where the text of that turn ends (`Layout.turn`). ``prefer_tokens=False`` renders every turn from its text.

The end of a turn is written once: where the sampled ids end with an EOS or another special token, that stands for the
template's own end of turn. Segments are tokenized separately, so no token spans the edge of a sampled turn. The text of
a special token in a message is a separate segment and is read as ordinary characters.

Assistant masks: in a sampled turn, exactly the sampled ids are True. In other turns, a token is True if it has a
character inside the template's ``{% generation %}`` blocks, or, in a template without such blocks, between the
generation prompt and the end of the turn, as `Layout.turn` finds them.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, count, filterfalse, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from corelm.errors import CapabilityError, TemplateError
from corelm.rendering.encoding import Tokenize
from corelm.rendering.layout import Layout, Span, Writer
from corelm.rendering.template import (
    Template,
    any_of,
    check_encodable,
    json_escape,
    map_chats,
    with_arguments,
    without_foreign_arguments,
)
from corelm.spec.message import Chat, Message, short_id
from corelm.spec.records import TokenizeResult
from corelm.tensors.ragged import Ragged
from corelm.validate import nested_texts, shown, unencodable

#: The ids of a segment, int64, and which of them are the assistant's, bool.
_Encoded = tuple[Tensor, Tensor]

_log = logging.getLogger(__name__)
#: The special tokens that `_warn_of_spelled` has warned about.
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, eq=False)
class RenderedChats:
    """Conversations as an engine takes them, one row each.

    Attributes:
        ids: int64.
        assistant: bool, as long as `ids`: True where a token is the assistant's; None if it was not asked for.
        texts: the rendering as text, including the text of sampled turns.
    """

    ids: Ragged
    assistant: Ragged | None
    texts: tuple[str, ...]


def render(
    chats: Sequence[Chat],
    tokenizer: Any,
    tokenize: Tokenize,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    eos_ids: Collection[int],
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    prefer_tokens: bool = True,
    want_assistant: bool = True,
) -> RenderedChats:
    """Render and tokenize conversations; sampled turns keep their ids.

    Args:
        add_generation_prompt: True for a prompt to sample from. False for a conversation to score: if its last turn is
            sampled, it ends with the last sampled id.
        continue_final_message: True for a prompt whose answer continues its last turn: it ends with what the template
            writes up to the end of that turn's content, or with the turn's ids if it was sampled.
        eos_ids: the ids that end a turn. Where a sampled turn ends with one of them, or with another special token, the
            template's own end of that turn is left out.
        chat_template: the template to use instead of the tokenizer's own.
        template_kwargs: variables for the template, such as `tools`.
        prefer_tokens: False renders sampled turns from their text.
        want_assistant: False skips the assistant masks.

    Raises:
        TemplateError: there is no template, or it fails, or it leaves out what a message says, or does not show where a
            turn is that was sampled or belongs in a mask. `rows` are the conversations at fault.
        InvalidRequestError: text cannot be encoded: that of a conversation (`rows` are those at fault), of the
            template, or of its variables.
        CapabilityError: masks need character offsets, and `tokenize` returns none.
    """
    cut = getattr(tokenizer, "render_segments", None) or partial(segments_of, tokenizer=tokenizer)
    asked: dict[str, Any] = {"eos_ids": eos_ids, "chat_template": chat_template, "template_kwargs": template_kwargs}
    asked |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    segments = cut(chats, **asked, prefer_tokens=prefer_tokens, want_assistant=want_assistant)
    # With tokens added to the tokenizer, texts have other ids.
    added = len(getattr(tokenizer, "added_tokens_decoder", ()))
    known: dict[Segment, _Encoded] = memory.of(getattr(tokenize, "__self__", tokenize)).setdefault(added, {})
    if new := [*filterfalse(known.__contains__, dict.fromkeys(chain.from_iterable(segments)))]:
        _learn(known, new, tokenize)
        if any(each.literal for each in new):
            _warn_of_spelled(chats, special_tokens(tokenizer).values(), prefer_tokens)
    ids, masks = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.bool)]
    lengths, texts = [0] * len(segments), [""] * len(segments)
    for row, parts in enumerate(segments):
        for each in parts:
            one, mask = known[each]
            ids.append(one)
            masks.append(mask)
            lengths[row] += len(one)
            texts[row] += each.text
    rows = Ragged(torch.cat(ids), torch.tensor(lengths, dtype=torch.int64))
    return RenderedChats(rows, rows.with_values(torch.cat(masks)) if want_assistant else None, tuple(texts))


def _warn_of_spelled(chats: Sequence[Chat], specials: Collection[str], prefer_tokens: bool) -> None:
    """Warn, once per special token, that it is read as characters where an assistant's turn spells it out."""
    special = any_of(specials)
    for number, message in ((at, each) for chat in chats for at, each in enumerate(chat) if each.role == "assistant"):
        if prefer_tokens and message.token_ids is not None:
            continue
        for text in nested_texts("history", message.for_template()):
            for found in set(special.findall(text)) - _warned:
                _warned.add(found)
                _log.warning(
                    "message %d: the assistant's turn %s spells out the special token %s, which is read as ordinary "
                    "characters; if the token is meant, give the turn its token_ids, or give what the token encloses "
                    "as reasoning_content or tool_calls and let the template write it",
                    number,
                    shown(text),
                    found,
                )


def _learn(known: dict[Segment, _Encoded], new: Sequence[Segment], tokenize: Tokenize) -> None:
    """Add the ids and masks of segments. One call tokenizes all texts, a second all literal ones."""
    for each in new:
        if each.ids is not None:
            known[each] = torch.tensor(each.ids, dtype=torch.int64), torch.ones(len(each.ids), dtype=torch.bool)
    for literal in (False, True):
        if texts := [each for each in new if each.ids is None and each.literal is literal]:
            offsets = any(each.spans for each in texts)
            spelled = [each.text for each in texts]
            batch = tokenize(spelled, add_special_tokens=False, parse_special=not literal, offsets=offsets)
            if offsets and batch.offsets is None:
                raise CapabilityError(
                    "the assistant mask of a turn that was not sampled needs the character offsets of every token, and "
                    "this tokenizer returns none; use a fast tokenizer, or do not ask for masks",
                    capability="offsets",
                )
            both = zip(batch.ids.split(), _assistant_mask(texts, batch).split(), strict=True)
            known.update(zip(texts, both, strict=True))
    memory.grow(sum(1_000 + 8 * len(known[each][0]) for each in new))


def _assistant_mask(segments: list[Segment], batch: TokenizeResult) -> Ragged:
    """bool, as long as the ids: True where a token has a character in a span of its segment.

    The assistant mask of transformers follows the same rule, but takes only the first token of a span's last character.
    """
    edges = Ragged.from_list([list(chain.from_iterable(segment.spans)) for segment in segments])
    if not edges.values.numel() or batch.offsets is None:
        return Ragged.full(batch.ids.lengths, False, torch.bool)
    # Lay all texts one after another on one axis. Spans are disjoint and ascending on it.
    lengths = torch.tensor([len(segment.text) for segment in segments], dtype=torch.int64)
    base = lengths.cumsum(0) - lengths
    begin, end = (edges.values + base[edges.row_index]).reshape(-1, 2).t().contiguous()
    shift = base[batch.ids.row_index]
    nearest = torch.searchsorted(end, batch.offsets[:, 0] + shift, right=True)
    # A sentinel after the last span, which no token reaches.
    begin = torch.cat([begin, lengths.sum(0, keepdim=True)])
    return batch.ids.with_values(begin[nearest] < batch.offsets[:, 1] + shift)


# Segments: text from the template, literal text, and the ids of sampled turns ----------------------------------------


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
    """What was made for each of some objects. All is forgotten once it is more than `most` characters."""

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._of: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
        #: By its id, an object that cannot be referenced weakly, and what was made for it.
        self._kept: dict[int, tuple[Any, dict[Any, Any]]] = {}

    def of(self, owner: Any) -> dict[Any, Any]:
        """Return what was made for an object, a dict to add to."""
        try:
            return self._of.setdefault(owner, {})
        except TypeError:
            return self._kept.setdefault(id(owner), (owner, {}))[1]

    def grow(self, size: int) -> None:
        """Count characters that were added."""
        self._size += size
        if self._size > self._most:
            self._size = 0
            self._of.clear()
            self._kept.clear()


#: For each tokenizer, what it wrote for prompts, so that a long rollout does not render all its prompts for each new
#: one: numbers for beginnings of conversations, by that of the beginning one message shorter and by that message;
#: segments, by the beginning that a turn is sampled after and how that turn was begun; and texts, by the ids that were
#: sampled. For each backend, because two may share a tokenizer: the ids and masks of segments.
memory = Memory(2**27)
_numbers = count()


class _Sampled(NamedTuple):
    """A sampled turn: its number, the text of its prompt, and its own text with special tokens."""

    number: int
    before: str
    text: str


def segments_of(
    chats: Sequence[Chat],
    tokenizer: Any,
    *,
    chat_template: str | None,
    template_kwargs: Mapping[str, Any] | None,
    eos_ids: Collection[int],
    **options: bool,
) -> list[list[Segment]]:
    """Render conversations and cut them into segments, which are still to be tokenized. See `render`.

    A tokenizer in another process has a method `render_segments` with the same arguments: it renders a whole batch
    there.
    """
    template = Template.find(tokenizer, chat_template, template_kwargs or {})
    cutter = _Cutter(chats, template, special_tokens(tokenizer), eos_ids, **options)
    return map_chats(cutter.cut, range(len(chats)))


@dataclass
class _Cutter:
    """Cuts conversations into segments, all with the same template and settings. See `render`."""

    chats: Sequence[Chat]
    template: Template
    specials: Mapping[int, str]
    eos_ids: Collection[int]
    add_generation_prompt: bool
    continue_final_message: bool
    prefer_tokens: bool
    want_assistant: bool

    def __post_init__(self) -> None:
        self._known = memory.of(self.template.tokenizer)
        settings = self.want_assistant, self.prefer_tokens, *sorted(self.eos_ids), *sorted(self.specials.items())
        root = self.template.source, repr(self.template.kwargs), settings
        self._root = self._remembered(root, partial(next, _numbers))

    @cached_property
    def _prepared(self) -> tuple[Writer, list[list[dict[str, Any]]]]:
        """What renders, and the messages of each conversation for the template. Not made if all is remembered."""
        template, tools = self.template, self.template.kwargs.get("tools")
        messages = [without_foreign_arguments([each.for_template() for each in chat], tools) for chat in self.chats]
        messages = _with_wanted_calls(template, messages)
        begun = [message.begun for chat in self.chats for message in chat if message.begun]
        texts = [text for chat in messages for message in chat for text in nested_texts("history", message)]
        contents = "\n".join([*texts, *nested_texts("history", begun)])
        if unencodable(contents):
            check_encodable(messages)
        everything = [contents, *nested_texts("template_kwargs", [template.source, template.kwargs])]
        everything += self.specials.values()
        # A template does not strip a private character as whitespace, and it has no case.
        mark = "\ue000"
        while any(mark in text or json_escape(mark) in text for text in everything):
            mark = f"\ue000{secrets.randbits(64)}\ue001"
        ends = [text for eos in sorted(self.eos_ids) if (text := template.tokenizer.decode([eos]))]
        writer = Writer(template, mark, self.specials.values(), ends, wants_masks=self.want_assistant)
        # Most batches contain no text of a special token, and then the messages need not be searched one by one.
        return writer, writer.with_slots(messages) if writer.special.search(contents) else messages

    def _remembered(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            made = self._known.setdefault(key, make())
            memory.grow(len(repr((key, made))))
        return self._known[key]

    def cut(self, row: int) -> list[Segment]:
        """Return the segments of a conversation."""
        chat, beginning, before, segments = self.chats[row], self._root, "", list[Segment]()
        previous: _Sampled | None = None
        for number, message in enumerate(chat):
            if self.prefer_tokens and message.token_ids is not None:
                write = partial(self._between, row, previous, number)
                part, ids = self._remembered((beginning, repr(message.begun)), write), message.token_ids
                text = self._remembered(("text", ids), partial(self._decoded, ids))
                before += "".join([segment.text for segment in part])
                previous = _Sampled(number, before, text)
                before += text
                segments += [*part, Segment(text, ids=ids)]
            beginning = self._remembered((beginning, *_key(message)), partial(next, _numbers))
        write = partial(self._between, row, previous, len(chat))
        if self.add_generation_prompt:
            # The next turn may be sampled from this prompt.
            segments += self._remembered((beginning, repr(None)), write)
        elif previous is None or previous.number + 1 < len(chat):
            segments += write()
        return segments

    def _decoded(self, ids: Sequence[int]) -> str:
        try:
            return str(self.template.tokenizer.decode(list(ids)))
        except Exception:
            # Ids that no token has are refused later, by row.
            return ""

    def _between(self, row: int, previous: _Sampled | None, number: int) -> list[Segment]:
        """Return what the template writes between a sampled turn, or the beginning, and turn `number`, or the end."""
        chat, (writer, messages) = self.chats[row], self._prepared
        kept = [self.prefer_tokens and bool(message.token_ids) for message in chat]
        self.template.refuse_lost_calls(messages[row], kept)
        layout, stop = self._layout(writer, chat, messages[row], number)
        text, literals, spans, _ = layout.written
        segments, start, first = list[Segment](), 0, 0
        if previous is not None:
            first = previous.number + 1
            start, ended = self._end_of(layout, chat[previous.number], previous)
            missing = "" if ended else layout.end_of_thinking(previous.before, previous.text)
            if not text.startswith(missing, start):
                segments.append(Segment(missing))
            # Around a sampled turn, the template's words are not the assistant's.
            spans = [span for span in spans if span[0] > start or (ended and span[0] == start)]
        if stop is not None and stop < start:
            raise TemplateError(f"message {number}: the chat template does not write the turns in order")
        if self.want_assistant and not writer.reads_blocks:
            turns = range(first, min(number, len(layout.messages)))
            found = [layout.turn(at) for at in turns if layout.messages[at]["role"] == "assistant"]
            spans = [(turn.start, turn.stop) for turn in found]
        text = text[:stop]
        edges = [start, *chain.from_iterable(span for span in literals if start <= span[0] < len(text)), len(text)]
        for at, (begin, end) in enumerate(pairwise(edges)):
            if begin < end:
                literal, inside = at % 2 == 1, _clip(spans, begin, end)
                # A special token that was typed is in a mask as a whole.
                inside = ((0, end - begin),) if literal and inside else inside
                segments.append(Segment(text[begin:end], literal=literal, spans=inside))
        return segments

    def _layout(
        self, writer: Writer, chat: Chat, messages: list[dict[str, Any]], number: int
    ) -> tuple[Layout, int | None]:
        """Render what a turn is sampled after. Return it and where it is cut, None for nowhere."""
        if number == len(chat):
            layout = Layout(writer, messages, self.add_generation_prompt)
            return layout, layout.beginning() if self.continue_final_message else None
        begun = chat[number].begun
        try:
            if begun is None:
                return Layout(writer, messages[:number], True), None
            given = writer.with_slots(Message.from_dict(begun).for_template())
            layout = Layout(writer, [*messages[:number], given], False)
            return layout, layout.beginning()
        except TemplateError as error:
            raise TemplateError(
                f"message {number}: the prompt that it was sampled from cannot be rendered: {error}; pass "
                "prefer_tokens=False to render its text instead"
            ) from error.__cause__

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


def _with_wanted_calls(template: Template, chats: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return the messages with their calls in a form that the template accepts.

    Where it fails on arguments that are objects, as DeepSeek's does, or writes them as Python does, they become JSON
    texts; where it fails on ids that have not nine letters or digits, as Mistral's does, they become such.
    """
    called = (chat[:at] for chat in chats for at, message in enumerate(chat, 1) if message.get("tool_calls"))
    if (first := next(called, None)) is None or _reads_calls(template, first):
        return chats
    for texts, short in ((True, False), (False, True), (True, True)):
        change = partial(_with_calls, texts=texts, short=short)
        if _reads_calls(template, list(map(change, first))):
            return [list(map(change, chat)) for chat in chats]
    return chats


def _reads_calls(template: Template, chat: list[dict[str, Any]]) -> bool:
    try:
        text = template.with_marks("", "")(chat, False)
    except TemplateError:
        return False
    arguments = [call.get("function", call).get("arguments") for call in chat[-1]["tool_calls"]]
    return not any(each and isinstance(each, dict) and repr(each) in text for each in arguments)


def _with_calls(message: dict[str, Any], *, texts: bool, short: bool) -> dict[str, Any]:
    """Return a message with its calls' arguments as JSON texts, or with short ids."""

    def text(_: Any, given: Any) -> Any:
        return json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else given

    def shortened(holder: dict[str, Any], key: str) -> dict[str, Any]:
        return {**holder, key: short_id(holder[key])} if short and isinstance(holder.get(key), str) else holder

    message = shortened(with_arguments(message, text) if texts else message, "tool_call_id")
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [shortened(call, "id") for call in calls]} if calls else message


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
