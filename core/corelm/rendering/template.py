"""`Template`: a tokenizer's chat template, found, applied and asked where the assistant's text is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from corelm.errors import TemplateError

T = TypeVar("T")
R = TypeVar("R")

_GENERATION = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")


class Marks(NamedTuple):
    """Three characters that occur nowhere in a batch: around placeholders, and where the assistant starts and stops.

    They are of Unicode's private use area: neither whitespace that a template would strip nor letters with a case.
    """

    slot: str
    start: str
    stop: str

    @classmethod
    def unused(cls, everything: str) -> Marks:
        """The first three that the text does not hold, as themselves or escaped as JSON does it."""
        escapes = "\\u" in everything
        free = (
            mark
            for mark in map(chr, range(0xE000, 0xF900))
            if mark not in everything and not (escapes and escaped(mark) in everything)
        )
        try:
            return cls(next(free), next(free), next(free))
        except StopIteration:
            raise TemplateError("the conversations use up Unicode's private use area (U+E000 to U+F8FF)") from None


def escaped(text: str) -> str:
    """As JSON writes it, without the quotes."""
    return json.dumps(text)[1:-1]


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template and the arguments it is rendered with.

    Attributes:
        source: the jinja text; None where only the tokenizer knows it.
        kwargs: variables for the template (`tools`, `enable_thinking`, …).
    """

    tokenizer: Any
    source: str | None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def find(cls, tokenizer: Any, chat_template: str | None, kwargs: Mapping[str, Any]) -> Template:
        """The template given, as jinja or as the name of one of the tokenizer's, else the tokenizer's own.

        Raises:
            TemplateError: there is none.
        """
        if not hasattr(tokenizer, "chat_template"):
            return cls(tokenizer, chat_template, kwargs)
        own = tokenizer.chat_template
        if isinstance(own, Mapping):
            name = "tool_use" if kwargs.get("tools") and "tool_use" in own else "default"
            source = own.get(name) if chat_template is None else own.get(chat_template, chat_template)
        else:
            source = own if chat_template is None else chat_template
        if source is None:
            raise TemplateError(
                "the tokenizer has no chat template; pass chat_template= (jinja), or use input_mode='text' or 'tokens'"
            )
        return cls(tokenizer, source, kwargs)

    def __call__(self, chat: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tokenize: bool = False) -> Any:
        """Render one conversation.

        Raises:
            TemplateError: the template failed; its own error is the cause.
        """
        try:
            return self._apply(list(chat), add_generation_prompt, tokenize)
        except Exception as error:
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def every(self, chats: Sequence[Sequence[Mapping[str, Any]]], add_generation_prompt: bool) -> list[str] | None:
        """Render conversations in one call, which takes half the time. None where the tokenizer cannot, or one of them
        fails.
        """
        if not all(chats):
            # Alone, an empty one is refused; among others it is not.
            return None
        try:
            texts = self._apply(list(map(list, chats)), add_generation_prompt, False)
        except Exception:
            return None
        same = isinstance(texts, list) and len(texts) == len(chats) and all(isinstance(text, str) for text in texts)
        return texts if same else None

    def _apply(self, chat: list[Any], add_generation_prompt: bool, tokenize: bool) -> Any:
        given = {} if self.source is None else {"chat_template": self.source}
        return self.tokenizer.apply_chat_template(
            chat, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **given, **self.kwargs
        )

    @property
    def marks_assistant(self) -> bool:
        """Whether it says by ``{% generation %}`` blocks what is the assistant's."""
        return self.source is not None and _GENERATION.search(self.source) is not None

    def with_marks(self, marks: Marks | None) -> Template:
        """The same template, writing ``marks.start`` and ``marks.stop`` at the edges of its generation blocks; with
        None, nothing there. The tokenizer itself must not be asked for them, which takes longer than all the rest.

        In their place stand blocks that have a scope of their own, as theirs is, and that do the same to the whitespace
        on either side: an inner block takes over the side that faces the text.
        """
        start, stop = ("", "") if marks is None else (f"{{{{ '{marks.start}' }}}}", f"{{{{ '{marks.stop}' }}}}")

        def rewritten(tag: re.Match[str]) -> str:
            left, right = tag["left"], tag["right"]
            if tag["end"]:
                return f"{{%{left} endif %}}{stop}{{% endwith {right}%}}"
            return f"{{%{left} with %}}{start}{{% if true {right}%}}"

        if not self.marks_assistant:
            return self
        assert self.source is not None
        return replace(self, source=_GENERATION.sub(rewritten, self.source))


def read_marks(text: str, marks: Marks) -> tuple[str, list[tuple[int, int]]]:
    """A marked rendering → the text without the marks, and ``[start, stop)`` of the assistant's characters in it.

    Raises:
        TemplateError: the marks do not come in pairs, as where a template cuts up what it has rendered.
    """
    before, *blocks = text.split(marks.start)
    parts, spans, at = [before], [], len(before)
    for block in blocks:
        inside, stop, after = block.partition(marks.stop)
        if not stop or marks.stop in after:
            break
        spans.append((at, at + len(inside)))
        parts += inside, after
        at += len(inside) + len(after)
    if len(spans) < len(blocks) or marks.stop in before:
        raise TemplateError(
            "the chat template's {% generation %} blocks did not come out in pairs; "
            "pass chat_template= with blocks that write straight to the output"
        )
    return "".join(parts), spans


def stand_in(message: Mapping[str, Any], placeholder: str) -> dict[str, Any]:
    """The message with a placeholder for the whole of what it says, tool calls and thinking included."""
    return {**{key: message[key] for key in ("role", "name") if key in message}, "content": placeholder}


def words(chats: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Every str in the messages, keys included, a line each."""
    messages = chain.from_iterable(chats)
    try:
        # Most messages hold nothing but text, and there are thousands.
        return "\n".join(chain.from_iterable(chain.from_iterable(map(dict.items, messages))))
    except TypeError:
        return "\n".join(strings(chats))


def strings(value: Any) -> list[str]:
    """Every str in nested mappings and lists, keys included."""
    found: list[str] = []
    waiting: list[Any] = [[value]]
    while waiting:
        one = waiting.pop()
        # A dict is a Mapping, but that takes ten times as long to find out.
        if isinstance(one, (dict, Mapping)):
            found += [key for key in one if isinstance(key, str)]
            one = one.values()
        for part in one:
            if isinstance(part, str):
                found.append(part)
            elif isinstance(part, (dict, Mapping, list, tuple)):
                waiting.append(part)
    return found


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same nesting with every str value changed; keys and everything else as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value


def by_row(function: Callable[[T], R], rows: Iterable[T]) -> list[R]:
    """`function` of every row; all rows that fail are found, then one error names them.

    Raises:
        TemplateError: `rows` has those that failed; the first one's cause is the cause.
    """
    results: list[R] = []
    failed: dict[int, TemplateError] = {}
    for index, row in enumerate(rows):
        try:
            results.append(function(row))
        except TemplateError as error:
            failed[index] = error
    if failed:
        problems = {index: str(error) for index, error in failed.items()}
        listing = "; ".join(f"conversation {index}: {what}" for index, what in problems.items())
        raise TemplateError(listing, problems=problems) from next(iter(failed.values())).__cause__
    return results
