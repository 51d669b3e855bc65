"""Where the turns of a conversation are in the text that a chat template writes for it.

A template is a program, and only its output says where a message went. `Layout` renders the conversation a second time,
with marks at both ends of what users and tools say, and at the end of what the assistant says. If that changes nothing
but the marks, it shows where every content begins and ends. What a template writes between two contents is the end of
one turn and the header of the next. Short renderings of the first turns show where the one ends and the other begins
(`TurnMarkers`), and each use of them is compared with the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from corelm.errors import TemplateError
from corelm.rendering.template import Marks, Template, json_escape
from corelm.validate import unencodable

Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]
#: Kinds of marks: where a content begins and ends, and where a value in the last call of a turn ends. Digits, which no
#: filter such as `upper` changes.
_BEGIN, _END, _CALL = 0, 1, 2


class WrittenText(NamedTuple):
    """What a template wrote, without marks.

    Attributes:
        text: the text.
        literals: ``[start, stop)`` of the texts of special tokens that users typed, ascending.
        spans: ``[start, stop)`` of what is in the template's ``{% generation %}`` blocks, ascending.
        edges: where marks stood, by the number of the message and the kind of the mark.
    """

    text: str
    literals: list[Span]
    spans: list[Span]
    edges: dict[tuple[int, int], int]


class Turn(NamedTuple):
    """An assistant's turn in a text.

    Attributes:
        start: where the prompt for it ends. end: where what it says ends. stop: where its end marker ends.
    """

    start: int
    end: int
    stop: int


@dataclass
class TurnMarkers:
    """What a template writes around the assistant's turns.

    Attributes:
        prompt: the generation prompt.
        end: what follows the assistant's text at the end of its turn, None if not known: up to the last special token,
            or all of it if there is none.
        headers: for the role of the message before: what stands between its content and the assistant's text.
        thinking: what follows the message before at the beginning of thinking, and what ends thinking; both empty if
            the template writes none.
    """

    prompt: str | None = None
    end: str | None = None
    thinking: tuple[str, str] | None = None
    headers: dict[str, str | None] = field(default_factory=dict)


class Writer:
    """Renders conversations with one template, and reads what it wrote.

    Attributes:
        template: with marks in place of its ``{% generation %}`` tags if masks are wanted and it has such tags.
        special: matches the text of any special token.
        end_texts: the texts that end a turn.
    """

    def __init__(
        self, template: Template, marks: Marks, special: re.Pattern[str], end_texts: Sequence[str], *, wants_masks: bool
    ) -> None:
        self.marks = marks
        self.reads_marks = wants_masks and template.marks_assistant
        self.template = template.with_marks(marks if self.reads_marks else None)
        self.special = special
        self.end_texts = end_texts
        self.markers = TurnMarkers()
        self._escaped_slot = json_escape(marks.slot)
        # The name of a slot has letters of both cases, so that a filter such as `upper` visibly alters it.
        self._marked = re.compile(
            f"{marks.slot}Text([0-9]+){marks.slot}|{marks.edge}([0-9]+)-([0-9]){marks.edge}|({marks.start})|({marks.stop})"
        )
        self._any_mark = re.compile(f"[{marks.slot}{marks.edge}{marks.start}{marks.stop}]")

    def write(self, messages: Messages, prompt: bool, typed: Sequence[str] = (), raw: str | None = None) -> WrittenText:
        """Render messages.

        Args:
            messages: with slots for special tokens that users typed.
            prompt: whether to add the generation prompt.
            typed: these special tokens, by the numbers of their slots.
            raw: the rendering, if it was made before.

        Raises:
            TemplateError: the template fails, or alters contents that hold a slot.
        """
        return self.read(self.template(messages, prompt) if raw is None else raw, typed)

    def read(self, raw: str, typed: Sequence[str]) -> WrittenText:
        """Return the text without its marks."""
        if typed and self._escaped_slot in raw:
            raise _altered()
        if self._any_mark.search(raw) is None:
            return WrittenText(_encodable(raw), [], [], {})
        parts: list[str] = []
        literals: list[Span] = []
        spans: list[Span] = []
        edges: dict[tuple[int, int], int] = {}
        at = done = 0
        opened: int | None = None
        for found in self._marked.finditer(raw):
            parts.append(raw[done : found.start()])
            at, done = at + found.start() - done, found.end()
            slot, number, side, start, _ = found.groups()
            if slot is not None:
                parts.append(typed[int(slot)])
                literals.append((at, at + len(parts[-1])))
                at += len(parts[-1])
            elif number is not None:
                key = int(number), int(side)
                # A content that is written twice is nowhere in particular. A call is written before its results.
                if key not in edges:
                    edges[key] = at
                elif key[1] != _CALL:
                    edges[key] = -1
            elif start and opened is None:
                opened = at
            elif not start and opened is not None:
                spans.append((opened, at))
                opened = None
            else:
                raise _unpaired()
        parts.append(raw[done:])
        text = "".join(parts)
        if opened is not None:
            raise _unpaired()
        if self._any_mark.search(text):
            raise _altered()
        return WrittenText(
            _encodable(text), literals, spans, {key: place for key, place in edges.items() if place >= 0}
        )

    def with_edges(self, messages: Messages, *, empty: bool, calls: bool) -> list[dict[str, Any]]:
        """Return the messages with marks inside the whitespace around their contents.

        Args:
            empty: whether to put marks into contents without text.
            calls: whether to put one into the last call of a turn, too.
        """
        marked, edge = [], self.marks.edge
        for number, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, str) and (empty or content.strip()):
                said = content.strip()
                head, tail = content.split(said, 1) if said else ("", content)
                # Templates look at how the assistant's text begins.
                begin = "" if message["role"] == "assistant" else f"{edge}{number}-{_BEGIN}{edge}"
                message = {**message, "content": f"{head}{begin}{said}{edge}{number}-{_END}{edge}{tail}"}
            if calls and message.get("tool_calls"):
                *others, last = message["tool_calls"]
                message = {**message, "tool_calls": [*others, _marked_call(last, f"{edge}{number}-{_CALL}{edge}")]}
            marked.append(dict(message))
        return marked

    def edges(self, messages: Messages, prompt: bool, typed: Sequence[str], text: str) -> dict[tuple[int, int], int]:
        """Return where contents begin and end in `text`, the rendering of `messages`; empty if marks change it."""
        for empty, calls in ((True, True), (False, True), (False, False)):
            try:
                marked = self.write(self.with_edges(messages, empty=empty, calls=calls), prompt, typed)
            except TemplateError:
                continue
            if marked.text == text:
                return marked.edges
        return {}

    def try_write(self, messages: Messages, prompt: bool, typed: Sequence[str]) -> str | None:
        """Return the rendering of some messages; None if the template refuses them. Most refuse an empty list."""
        try:
            return self.write(messages, prompt, typed).text
        except TemplateError:
            return None


class Layout:
    """One conversation as the template writes it, and where its assistant turns are.

    Attributes:
        messages: for the template, with slots for special tokens.
        typed: these special tokens.
        written: the rendering.
    """

    def __init__(
        self, writer: Writer, messages: Messages, prompt: bool, typed: Sequence[str] = (), raw: str | None = None
    ) -> None:
        self.messages = messages
        self.typed = typed
        self.written = writer.write(messages, prompt, typed, raw)
        self._writer = writer
        self._prompt = prompt
        self._refuse_lost_contents()

    def _refuse_lost_contents(self) -> None:
        """Refuse a text that lacks what a user or a tool said: templates for images leave out contents that are texts.

        Raises:
            TemplateError: it does.
        """
        text, at = self.written.text, 0
        for number, message in enumerate(self.messages):
            content = message.get("content")
            if message["role"] not in ("user", "tool") or not isinstance(content, str):
                continue
            said = content.strip()
            # Most templates write messages in order.
            if (found := text.find(said, at)) >= 0:
                at = found + len(said)
                continue
            if said in text or self._writer.marks.slot in said:
                continue
            # It may be written in another form, as JSON, for example.
            marked = self._writer.with_edges(self.messages, empty=False, calls=False)
            if not any(key[0] == number for key in self._writer.write(marked, self._prompt, self.typed).edges):
                raise TemplateError(
                    f"message {number}: the chat template leaves out its content; pass chat_template= with a template "
                    "that writes texts of this role"
                )

    def turn(self, number: int, *, sampled: bool = False) -> Turn:
        """Return where an assistant's turn is.

        Args:
            sampled: whether only its end has to be right.

        Raises:
            TemplateError: the text does not show it.
        """
        found = self._find(number, sampled)
        if found is None:
            raise TemplateError(
                f"message {number}: the chat template leaves this turn out, or writes it otherwise once other messages "
                "follow, and its place in the text cannot be told; pass chat_template= with a template that writes "
                "every turn once and in order ({% generation %} markers help), or prefer_tokens=False and no masks to "
                "take its text as it is"
            )
        return found

    def content_end(self, number: int) -> int | None:
        """Return where the content of a message ends, trailing whitespace included if the template writes it."""
        at = self._edges.get((number, _END))
        return None if at is None else at + len(_kept(self.messages[number]["content"], self.written.text, at))

    def beginning(self) -> int:
        """Return where the content of the last message ends, for an answer that continues it.

        Raises:
            TemplateError: the template does not write that content, or changes it.
        """
        last = len(self.messages) - 1
        if (at := self.content_end(last)) is None:
            raise TemplateError(
                f"message {last}: the chat template does not write its content as it is, so an answer cannot continue "
                "it; pass chat_template= with a template that does, or remove that turn"
            )
        return at

    @cached_property
    def _edges(self) -> dict[tuple[int, int], int]:
        return self._writer.edges(self.messages, self._prompt, self.typed, self.written.text)

    def _find(self, number: int, sampled: bool) -> Turn | None:
        edges, text, message = self._edges, self.written.text, self.messages[number]
        content, calls, own = message.get("content") or "", message.get("tool_calls"), self.content_end(number)
        if own is not None and own > edges.get((number + 1, _BEGIN), own):
            # The results of its calls stand inside the turn, before its content.
            own = None
        marks = [at for at in (own, edges.get((number, _CALL))) if at is not None]
        if not edges or (content.strip() and not marks):
            return None
        # The nearest contents before and after it. A template may move others, such as those of the system.
        ends = map(self.content_end, range(number - 1, -1, -1))
        low = next((at for at in ends if at is not None and at <= min(marks, default=at)), 0)
        begins = (edges.get((other, _BEGIN), -1) for other in range(number + 1, len(self.messages)))
        high = next((at for at in begins if at >= max(marks, default=low)), len(text))
        if own is None and content.strip() and content.strip() in text[low:high]:
            return None
        start = self._after_header(number, low, high if own is None else own)
        if start is None and own is not None and text[:own].endswith(content):
            start = own - len(content)
        if start is None and sampled:
            start = low
        if start is None:
            return None
        said = max([start, *marks])
        if own is None or calls:
            stop = self._stop(number, said, high)
        elif (end := self._end_marker()) is not None and text.startswith(end, own):
            stop = own + len(end)
        else:
            stop = self._stop(number, own, high)
        if stop is None:
            return None
        return Turn(start, said + len(self._before_end(text[said:stop])) if own is None or calls else own, stop)

    def _stop(self, number: int, said: int, high: int) -> int | None:
        """Return where a turn stops between what it says last and the next content."""
        gap, header = self.written.text[said:high], self._writer.special.match(self._generation_prompt() or "")
        last = number + 1 == len(self.messages)
        if last and not self._prompt:
            return said + len(self._trimmed(gap))
        if not last and (number + 1, _BEGIN) not in self._edges:
            return None
        if header and header[0] in gap:
            return said + len(gap[: gap.rfind(header[0])].rstrip())
        if found := [gap.rfind(end) + len(end) for end in self._ends() if end in gap]:
            return said + max(found)
        tail = self._tail(number, _CALL if self._edges.get((number, _CALL)) == said else _END)
        if tail is None:
            whole = self._writer.try_write(self.messages[: number + 1], False, self.typed) or ""
            tail = self._trimmed(whole[said:]) if whole.startswith(self.written.text[:said]) else ""
        rests = [rest for rest in (tail, self._before_end(tail)) if rest and gap.startswith(rest)]
        return said + len(rests[0]) if rests else None

    def _trimmed(self, text: str) -> str:
        """Return a text that may end with special tokens without whitespace after these."""
        return text.rstrip() if self._writer.special.search(text) else text

    def _ends(self) -> list[str]:
        """Return what may end a turn."""
        end = self._end_marker() or ""
        return [each for each in (end, end.strip(), *self._writer.end_texts) if each.strip()]

    def _before_end(self, text: str) -> str:
        """Return a text without end markers."""
        while end := next((each for each in self._ends() if text.endswith(each)), None):
            text = text[: -len(end)]
        return text

    def _after_header(self, number: int, low: int, high: int) -> int | None:
        """Return where the header of an assistant's turn ends.

        Args:
            low: where the nearest content before the turn ends.
            high: where its own content ends, or that of the next message begins.
        """
        text, prompt = self.written.text, self._generation_prompt() or ""
        if (header := self._header(number)) is not None and (number - 1, _END) in self._edges:
            # The prompt, which a template may also write unasked, may open a block of thinking that the turn lacks.
            parts = re.finditer(f"(?<=\n)(?!\n)|{self._writer.special.pattern}", header)
            opening = len(header) - len(prompt or header)
            ends = [len(header), *(at for found in parts for at in found.span() if opening < at < len(header))]
            shown = (low + end for end in sorted(ends, reverse=True) if text.startswith(header[:end], low))
            if (start := next((at for at in shown if at <= high), None)) is not None:
                return start
        at = text.rfind(prompt, low, high) if prompt.strip() else -1
        return at + len(prompt) if at >= 0 else None

    # What the first turns show ------------------------------------------------------------------------------------

    def _generation_prompt(self) -> str | None:
        markers = self._writer.markers
        if markers.prompt is None:
            opening, write = self.messages[: self._first_assistant()], self._writer.try_write
            with_prompt, without = write(opening, True, self.typed), write(opening, False, self.typed)
            if with_prompt is not None and without is not None:
                # A template may write an end instead of the prompt.
                pairs = enumerate(zip(with_prompt, without, strict=False))
                same = next((at for at, (one, other) in pairs if one != other), min(len(with_prompt), len(without)))
                cut = (found.start() for found in self._writer.special.finditer(with_prompt) if same < found.end())
                markers.prompt = with_prompt[min(same, next(cut, same)) :]
        return markers.prompt

    def _end_marker(self) -> str | None:
        markers = self._writer.markers
        if markers.end is None:
            spoken = (
                at
                for at, each in enumerate(self.messages)
                if each["role"] == "assistant" and (each.get("content") or "").strip() and not each.get("tool_calls")
            )
            if (first := next(spoken, None)) is None:
                return None
            markers.end = self._tail(first, _END)
        return markers.end

    def _tail(self, number: int, side: int) -> str | None:
        """Return what the template writes after a mark in a turn when no message follows, up to the end of the turn."""
        for prompt in (self._generation_prompt() or "", ""):
            after = self._after(self.messages[: number + 1], bool(prompt), side)
            if after is not None and after.endswith(prompt):
                return self._trimmed(self._without_prompt(after.removesuffix(prompt), number))
        return None

    def end_of_thinking(self, before: str, answer: str) -> str:
        """Return the text that closes the thinking of an answer that was cut off inside it, "" for other answers.

        Args:
            before: the text of the prompt that it was sampled from.
            answer: its own text, as it was sampled.
        """
        markers, prompt = self._writer.markers, self._generation_prompt() or ""
        if not before.endswith(prompt):
            return ""
        if markers.thinking is None:
            markers.thinking = self._thinking(prompt)
        (begin, end), said = markers.thinking, prompt + answer
        tag = self._writer.special.search(end)
        closed = (end[: tag.end()] if tag else end).strip() in said[len(begin.rstrip()) :]
        return "" if closed or not said.startswith(begin.rstrip()) else end

    def _thinking(self, prompt: str) -> tuple[str, str]:
        first, edge = self._first_assistant(), self._writer.marks.edge
        thought, content = (f"{edge}{first}-{side}{edge}" for side in (_BEGIN, _END))
        turn = {"role": "assistant", "content": content, "reasoning_content": thought}
        without = self._writer.try_write(self.messages[:first], False, self.typed)
        try:
            text, _, _, edges = self._writer.write([*self.messages[:first], turn], False, self.typed)
        except TemplateError:
            text, edges = "", {}
        begin, end = edges.get((first, _BEGIN)), edges.get((first, _END))
        if begin is not None and end is not None and without is not None and text.startswith(without):
            return text[len(without) : begin], text[begin:end]
        # Many templates write thinking into prompts only.
        tag = re.search(r"([<\[])(\w*think\w*)([>\]])(\s*)$", prompt, re.IGNORECASE)
        return (prompt, "{3}{0}/{1}{2}{3}{3}".format(*tag.groups())) if tag else ("", "")

    def _first_assistant(self) -> int:
        roles = [each["role"] for each in self.messages]
        return roles.index("assistant") if "assistant" in roles else len(roles)

    def _without_prompt(self, after: str, number: int) -> str:
        """Return what follows a turn without the generation prompt of a template that writes one unasked."""
        if self._generation_prompt() or number == 0:
            return after
        header, same = self._header(number) or "", 0
        while same < min(len(after), len(header)) and after[-1 - same] == header[-1 - same]:
            same += 1
        # Where all roles share an end, that is no part of the prompt.
        prompt = after[len(after) - same :]
        shared = max([prompt.rfind(each) + len(each) for each in self._writer.end_texts if each in prompt], default=0)
        return after[: len(after) - same + shared]

    def _header(self, number: int) -> str | None:
        headers, roles = self._writer.markers.headers, [message["role"] for message in self.messages]
        if number and (role := roles[number - 1]) not in headers:
            first = next(at for at in range(1, len(roles)) if roles[at - 1 : at + 1] == [role, roles[number]])
            headers[role] = self._after(self.messages[:first], True)
        return headers.get(roles[number - 1]) if number else None

    def _after(self, messages: Messages, prompt: bool, side: int = _END) -> str | None:
        """Return what the template writes after a mark in the last message."""
        text = self._writer.try_write(messages, prompt, self.typed)
        edges = {} if text is None else self._writer.edges(messages, prompt, self.typed, text)
        at = edges.get((len(messages) - 1, side))
        if text is None or at is None:
            return None
        return text[at:].removeprefix(_kept(messages[-1]["content"], text, at) if side == _END else "")


def _marked_call(call: Any, mark: str) -> Any:
    """Return a call with a mark at the end of the last text in its arguments, or else of its name."""
    if isinstance(call, str):
        return call + mark
    if isinstance(call, list):
        return [*call[:-1], _marked_call(call[-1], mark)] if call else call
    if not isinstance(call, dict):
        return call
    for key in ("function", "arguments", *reversed(call), "name"):
        if key in call and key not in ("id", "type") and (made := _marked_call(call[key], mark)) != call[key]:
            return {**call, key: made}
    return call


def _kept(content: str, text: str, at: int) -> str:
    """Return the whitespace at the end of a content if the template writes it, too, at a place of its text."""
    blanks = content[len(content.rstrip()) :]
    return blanks if text.startswith(blanks, at) else ""


def _encodable(text: str) -> str:
    if what := unencodable(text):
        raise TemplateError(f"the chat template writes text that cannot be encoded: {what}")
    return text


def _altered() -> TemplateError:
    return TemplateError(
        "the chat template alters the contents of messages, and a message contains the text of a special token, which "
        "could then become that token; pass a chat_template= that writes contents unchanged, or change the text of the "
        "message"
    )


def _unpaired() -> TemplateError:
    return TemplateError(
        "the start and end of the chat template's {% generation %} blocks did not come out in pairs; pass a "
        "chat_template= whose blocks write straight to the output"
    )
