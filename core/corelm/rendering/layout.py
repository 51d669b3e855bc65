"""Where the turns of a conversation are in the text that a chat template writes for it.

A template is a program, and only its output says where a message went. `Layout` renders the conversation a second time,
with marks at both ends of what users and tools say, and at the end of what the assistant says. If that changes nothing
but the marks, it shows where every content begins and ends. What a template writes between two contents is the end of
one turn and the header of the next. Short renderings of the first turns show where the one ends and the other begins,
and each use of them is compared with the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from corelm.errors import TemplateError
from corelm.rendering.template import Template, any_of, json_escape, map_strings
from corelm.validate import nested_texts, unencodable

Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]
#: By the number of a message and the kind of a mark, where it stood in a text.
Edges = Mapping[tuple[int, int], int]
#: Kinds of marks: where a content begins and ends, where a value in the last call of a turn ends, and where a
#: ``{% generation %}`` block begins and ends. Digits, which no filter such as `upper` changes.
_BEGIN, _END, _CALL, _OPEN, _CLOSE = range(5)


class WrittenText(NamedTuple):
    """What a template wrote, without marks.

    Attributes:
        literals: ``[start, stop)`` of the texts of special tokens that users typed, ascending.
        spans: ``[start, stop)`` of what is in the template's ``{% generation %}`` blocks, ascending.
        edges: where marks stood.
    """

    text: str
    literals: list[Span]
    spans: list[Span]
    edges: Edges


class Turn(NamedTuple):
    """An assistant's turn in a text.

    Attributes:
        start, end, stop: where the prompt for it, what it says, and its end marker end.
    """

    start: int
    end: int
    stop: int


class Writer:
    """Renders conversations with one template, and reads what it wrote.

    Attributes:
        template: with marks in place of its ``{% generation %}`` tags if masks are wanted and it has such tags.
        mark: stands on both sides of a mark. No message contains it.
        special: matches the text of any special token.
        end_texts: the texts that end a turn.
        reads_blocks: whether the template's ``{% generation %}`` blocks are the assistant's.
        learned: what short renderings showed of the template, by what it is.
    """

    def __init__(
        self, template: Template, mark: str, specials: Collection[str], end_texts: Sequence[str], *, wants_masks: bool
    ) -> None:
        self.reads_blocks = wants_masks and template.marks_assistant
        tags = [f"{{{{ '{mark}0-{kind}{mark}' }}}}" if self.reads_blocks else "" for kind in (_OPEN, _CLOSE)]
        self.template, self.mark, self.end_texts = template.with_marks(*tags), mark, end_texts
        self._specials = list(specials)
        self.special = any_of(specials)
        # The name of a slot has letters of both cases, so that a filter such as `upper` visibly alters it.
        self._marked = re.compile(f"{mark}(?:Text([0-9]+)|([0-9]+)-([0-9])){mark}")
        self.learned: dict[str, Any] = {}
        tools = self.template.kwargs.get("tools")
        if any(map(self.special.search, nested_texts("template_kwargs", tools))):
            kwargs = {**self.template.kwargs, "tools": self.with_slots(tools)}
            self.template = replace(self.template, kwargs=kwargs)

    def with_slots(self, value: Any) -> Any:
        """Return nested texts with slots in place of the texts of special tokens, which users typed."""

        def slot(found: re.Match[str]) -> str:
            return f"{self.mark}Text{self._specials.index(found[0])}{self.mark}"

        return map_strings(value, lambda text: self.special.sub(slot, text))

    def write(self, messages: Messages, prompt: bool) -> WrittenText:
        """Render messages, with slots for special tokens that users typed. A template may not alter slots."""
        raw = self.template(messages, prompt)
        parts: list[str] = []
        literals: list[Span] = []
        blocks: list[tuple[int, int]] = []
        edges: dict[tuple[int, int], int] = {}
        at = done = 0
        for found in self._marked.finditer(raw):
            parts.append(raw[done : found.start()])
            at, done = at + found.start() - done, found.end()
            slot, number, kind = found.groups()
            if slot is not None:
                parts.append(self._specials[int(slot)])
                literals.append((at, at + len(parts[-1])))
                at += len(parts[-1])
            elif (key := (int(number), int(kind)))[1] < _OPEN:
                # A content that is written twice is nowhere in particular. A call is written before its results.
                edges[key] = edges.get(key, at) if key[1] == _CALL or key not in edges else -1
            else:
                blocks.append((key[1], at))
        text = "".join([*parts, raw[done:]])
        if [kind for kind, _ in blocks] != [_OPEN, _CLOSE] * (len(blocks) // 2):
            raise TemplateError(
                "the start and end of the chat template's {% generation %} blocks did not come out in pairs; pass a "
                "chat_template= whose blocks write straight to the output"
            )
        spans = [(begin, end) for (_, begin), (_, end) in zip(blocks[::2], blocks[1::2], strict=True)]
        if self.mark in text or json_escape(self.mark) in text:
            raise TemplateError(
                "the chat template alters the contents of messages, and a message contains the text of a special "
                "token, which could then become that token; pass a chat_template= that writes contents unchanged, or "
                "change the text of the message"
            )
        if what := unencodable(text):
            raise TemplateError(f"the chat template writes text that cannot be encoded: {what}")
        return WrittenText(text, literals, spans, {key: place for key, place in edges.items() if place >= 0})

    def try_write(self, messages: Messages, prompt: bool) -> str | None:
        """Return the rendering of some messages; None if the template refuses them. Most refuse an empty list."""
        try:
            return self.write(messages, prompt).text
        except TemplateError:
            return None

    def with_edges(self, messages: Messages, *, empty: bool, calls: bool) -> list[dict[str, Any]]:
        """Return the messages with marks inside the whitespace around their contents.

        With `empty` also in contents without text, with `calls` also in the last call of a turn.
        """
        marked, mark = [], self.mark
        for number, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, str) and (empty or content.strip()):
                said = content.strip()
                head, tail = content.split(said, 1) if said else ("", content)
                # Templates look at how the assistant's text begins.
                begin = "" if message["role"] == "assistant" else f"{mark}{number}-{_BEGIN}{mark}"
                message = {**message, "content": f"{head}{begin}{said}{mark}{number}-{_END}{mark}{tail}"}
            if calls and message.get("tool_calls"):
                *others, last = message["tool_calls"]
                message = {**message, "tool_calls": [*others, _marked_call(last, f"{mark}{number}-{_CALL}{mark}")]}
            marked.append(dict(message))
        return marked

    def edges(self, messages: Messages, prompt: bool, text: str) -> Edges:
        """Return where contents begin and end in `text`, the rendering of `messages`; empty if marks change it.

        A content ends after the whitespace at its end if the template writes that, too.
        """
        for empty, calls in ((True, True), (False, True), (False, False)):
            try:
                marked = self.write(self.with_edges(messages, empty=empty, calls=calls), prompt)
            except TemplateError:
                continue
            if marked.text == text:
                edges = dict(marked.edges)
                for (number, kind), at in marked.edges.items():
                    content = messages[number]["content"] if kind == _END else ""
                    blanks = content[len(content.rstrip()) :]
                    edges[number, kind] = at + len(blanks) if text.startswith(blanks, at) else at
                return edges
        return {}


class Layout:
    """One conversation as the template writes it, and where its assistant turns are.

    Attributes:
        messages: for the template, with slots for special tokens.
        written: the rendering.
    """

    def __init__(self, writer: Writer, messages: Messages, prompt: bool) -> None:
        self.messages, self._writer, self._prompt = messages, writer, prompt
        self.written = writer.write(messages, prompt)
        self._refuse_lost_contents()

    def _refuse_lost_contents(self) -> None:
        """Refuse a text that lacks what a user or a tool said: templates for images leave out plain texts."""
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
            # It may be written in another form, as JSON, for example.
            if said not in text and self._writer.mark not in said and (number, _END) not in self._edges:
                raise TemplateError(
                    f"message {number}: the chat template leaves out its content; pass chat_template= with a template "
                    "that writes texts of this role"
                )

    def turn(self, number: int, *, sampled: bool = False) -> Turn:
        """Return where an assistant's turn is; of one that was `sampled`, only the end has to be right."""
        found = self._find(number, sampled)
        if found is None:
            raise TemplateError(
                f"message {number}: the chat template leaves this turn out, or writes it otherwise once other messages "
                "follow, and its place in the text cannot be told; pass chat_template= with a template that writes "
                "every turn once and in order ({% generation %} markers help), or prefer_tokens=False and no masks to "
                "take its text as it is"
            )
        return found

    def beginning(self) -> int:
        """Return where the content of the last message ends, for an answer that continues it."""
        last = len(self.messages) - 1
        if (at := self._edges.get((last, _END))) is None:
            raise TemplateError(
                f"message {last}: the chat template does not write its content as it is, so an answer cannot continue "
                "it; pass chat_template= with a template that does, or remove that turn"
            )
        return at

    @cached_property
    def _edges(self) -> Edges:
        return self._writer.edges(self.messages, self._prompt, self.written.text)

    def _find(self, number: int, sampled: bool) -> Turn | None:
        edges, text, message = self._edges, self.written.text, self.messages[number]
        content, own = (message.get("content") or "").strip(), edges.get((number, _END))
        if own is not None and own > edges.get((number + 1, _BEGIN), own):
            # The results of its calls stand inside the turn, before its content.
            own = None
        marks = [at for at in (own, edges.get((number, _CALL))) if at is not None]
        if not edges or (content and not marks):
            return None
        # The nearest contents before and after it.
        low = next((edges[other, _END] for other in range(number - 1, -1, -1) if (other, _END) in edges), 0)
        after = range(number + 1, len(self.messages))
        high = next((edges[other, _BEGIN] for other in after if (other, _BEGIN) in edges), len(text))
        if own is None and content and content in text[low:high]:
            return None
        start = self._after_header(number, low, high if own is None else own)
        if start is None and own is not None and text[:own].endswith(message["content"]):
            start = own - len(message["content"])
        if start is None and sampled:
            start = low
        if start is None:
            return None
        said, end, spoken = max([start, *marks]), self._end_marker, None if message.get("tool_calls") else own
        if spoken is not None and end is not None and text.startswith(end, spoken):
            return Turn(start, spoken, spoken + len(end))
        if (stop := self._stop(number, said, high)) is None:
            return None
        return Turn(start, said + len(self._before_end(text[said:stop])) if spoken is None else spoken, stop)

    def _stop(self, number: int, said: int, high: int) -> int | None:
        """Return where a turn stops between what it says last and the next content."""
        gap, header = self.written.text[said:high], self._writer.special.match(self._generation_prompt)
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
            whole = self._writer.try_write(self.messages[: number + 1], False) or ""
            tail = self._trimmed(whole[said:]) if whole.startswith(self.written.text[:said]) else ""
        rests = [rest for rest in (tail, self._before_end(tail)) if rest and gap.startswith(rest)]
        return said + len(rests[0]) if rests else None

    def _after_header(self, number: int, low: int, high: int) -> int | None:
        """Return where the header of an assistant's turn ends.

        `low` is where the nearest content before the turn ends, `high` where its own ends, or the next begins.
        """
        text, prompt = self.written.text, self._generation_prompt
        for header in self._headers(number) if (number - 1, _END) in self._edges else ():
            if text.startswith(header, low) and low + len(header) <= high:
                return low + len(header)
        at = text.rfind(prompt, low, high) if prompt.strip() else -1
        return at + len(prompt) if at >= 0 else None

    def _trimmed(self, text: str) -> str:
        """Return a text that may end with special tokens without whitespace after these."""
        return text.rstrip() if self._writer.special.search(text) else text

    def _ends(self) -> list[str]:
        end = self._end_marker or ""
        return [each for each in (end, end.strip(), *self._writer.end_texts) if each.strip()]

    def _before_end(self, text: str) -> str:
        while end := next((each for each in self._ends() if text.endswith(each)), None):
            text = text[: -len(end)]
        return text

    # What short renderings show of the template -----------------------------------------------------------------------

    def _learned(self, what: str, show: Callable[[], Any]) -> Any:
        """Return what a template writes, as `show` finds it once; None if this conversation does not show it."""
        learned = self._writer.learned
        if learned.get(what) is None:
            learned[what] = show()
        return learned[what]

    @property
    def _first_assistant(self) -> int:
        return next((at for at, each in enumerate(self.messages) if each["role"] == "assistant"), len(self.messages))

    @property
    def _generation_prompt(self) -> str:
        """The generation prompt; "" if the template writes none, or it is not known."""
        return self._learned("prompt", self._show_prompt) or ""

    def _show_prompt(self) -> str | None:
        opening = self.messages[: self._first_assistant]
        asked, unasked = (self._writer.try_write(opening, prompt) for prompt in (True, False))
        if asked is None or unasked is None:
            return None
        # A template may write an end instead of the prompt.
        same = _same(asked, unasked)
        cut = (found.start() for found in self._writer.special.finditer(asked) if same < found.end())
        return asked[min(same, next(cut, same)) :]

    @property
    def _end_marker(self) -> str | None:
        """What follows the assistant's text at the end of its turn, up to the last special token if there is one."""
        return self._learned("end", self._show_end)

    def _show_end(self) -> str | None:
        for at, each in enumerate(self.messages):
            if each["role"] == "assistant" and (each.get("content") or "").strip() and not each.get("tool_calls"):
                return self._tail(at, _END)
        return None

    def _tail(self, number: int, kind: int) -> str | None:
        """Return what the template writes after a mark in a turn when no message follows, up to the end of the turn."""
        for prompt in dict.fromkeys((self._generation_prompt, "")):
            after = self._after(self.messages[: number + 1], bool(prompt), kind)
            if after is not None and after.endswith(prompt):
                return self._trimmed(self._without_prompt(after.removesuffix(prompt), number))
        return None

    def _without_prompt(self, after: str, number: int) -> str:
        """Return what follows a turn without the generation prompt of a template that writes one unasked."""
        if self._generation_prompt or not (headers := self._headers(number)):
            return after
        same = _same(after[::-1], headers[0][::-1])
        # Where all roles share an end, that is no part of the prompt.
        prompt = after[len(after) - same :]
        shared = max([prompt.rfind(each) + len(each) for each in self._writer.end_texts if each in prompt], default=0)
        return after[: len(after) - same + shared]

    def _headers(self, number: int) -> list[str]:
        """Return what may stand between the content of the message before a turn and the turn, the longest first."""
        role = self.messages[number - 1]["role"] if number else None
        return self._learned(f"headers after {role}", lambda: self._show_headers(role)) or []

    def _show_headers(self, role: str | None) -> list[str] | None:
        roles = [message["role"] for message in self.messages]
        first = next((at for at in range(1, len(roles)) if roles[at - 1 : at + 1] == [role, "assistant"]), 0)
        if (header := self._after(self.messages[:first], True, _END)) is None:
            return None
        # The prompt, which a template may also write unasked, may open a block of thinking that the turn lacks.
        parts = re.finditer(f"(?<=\n)(?!\n)|{self._writer.special.pattern}", header)
        opening = len(header) - len(self._generation_prompt or header)
        ends = {len(header), *(at for found in parts for at in found.span() if opening < at < len(header))}
        return [header[:end] for end in sorted(ends, reverse=True)]

    def _after(self, messages: Messages, prompt: bool, kind: int) -> str | None:
        """Return what the template writes after a mark in the last message."""
        text = self._writer.try_write(messages, prompt)
        at = None if text is None else self._writer.edges(messages, prompt, text).get((len(messages) - 1, kind))
        return None if text is None or at is None else text[at:]

    def end_of_thinking(self, before: str, answer: str) -> str:
        """Return the text that closes the thinking of an answer to `before` that was cut off inside it, else ""."""
        prompt = self._generation_prompt
        if not before.endswith(prompt):
            return ""
        (begin, end), said = self._learned("thinking", self._show_thinking), prompt + answer
        tag = self._writer.special.search(end)
        closed = (end[: tag.end()] if tag else end).strip() in said[len(begin.rstrip()) :]
        return "" if closed or not said.startswith(begin.rstrip()) else end

    def _show_thinking(self) -> tuple[str, str]:
        """Return what follows the message before at the beginning of thinking, and what ends it; empty if nothing."""
        first, mark, prompt = self._first_assistant, self._writer.mark, self._generation_prompt
        thought, content = (f"{mark}{first}-{kind}{mark}" for kind in (_BEGIN, _END))
        turn = {"role": "assistant", "content": content, "reasoning_content": thought}
        without = self._writer.try_write(self.messages[:first], False)
        try:
            text, _, _, edges = self._writer.write([*self.messages[:first], turn], False)
        except TemplateError:
            text, edges = "", {}
        begin, end = edges.get((first, _BEGIN)), edges.get((first, _END))
        if begin is not None and end is not None and without is not None and text.startswith(without):
            return text[len(without) : begin], text[begin:end]
        # Many templates write thinking into prompts only.
        tag = re.search(r"([<\[])(\w*think\w*)([>\]])(\s*)$", prompt, re.IGNORECASE)
        return (prompt, "{3}{0}/{1}{2}{3}{3}".format(*tag.groups())) if tag else ("", "")


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


def _same(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
