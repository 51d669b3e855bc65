"""`Template`: find a tokenizer's chat template, render conversations with it, and locate the assistant's text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from corelm.errors import TemplateError
from corelm.rendering.chatml import named_template

T = TypeVar("T")
R = TypeVar("R")

_GENERATION = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")


class Marks(NamedTuple):
    """Three characters that occur nowhere in a batch of conversations.

    They come from Unicode's private use area: a template does not strip them as whitespace, and they have no case.

    Attributes:
        slot: stands on both sides of a placeholder.
        start: stands before the assistant's text.
        stop: stands after the assistant's text.
    """

    slot: str
    start: str
    stop: str

    @classmethod
    def find_unused(cls, everything: str) -> Marks:
        """Return the first three such characters that `everything` contains neither literally nor in JSON's escape."""
        escapes = "\\u" in everything
        free = (
            mark
            for mark in map(chr, range(0xE000, 0xF900))
            if mark not in everything and not (escapes and json_escape(mark) in everything)
        )
        try:
            return cls(next(free), next(free), next(free))
        except StopIteration:
            raise TemplateError(
                "the conversations contain every character of Unicode's private use area (U+E000 to U+F8FF), and "
                "rendering needs three of them; remove some from the messages"
            ) from None


def json_escape(text: str) -> str:
    """Return the text as JSON writes it, without the quotes."""
    return json.dumps(text)[1:-1]


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template and the variables it is rendered with.

    Attributes:
        tokenizer: its `apply_chat_template` renders.
        source: the jinja text; None if only the tokenizer has it.
        kwargs: variables for the template (`tools`, `enable_thinking`, …).
    """

    tokenizer: Any
    source: str | None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def find(cls, tokenizer: Any, chat_template: str | None, kwargs: Mapping[str, Any]) -> Template:
        """Return the given template, else the tokenizer's own.

        Args:
            chat_template: jinja text, the name of one of the tokenizer's templates, or "chatml".

        Raises:
            TemplateError: no template was given, and the tokenizer has none; or no template has the given name.
        """
        if chat_template is not None:
            chat_template = named_template(chat_template, getattr(tokenizer, "chat_template", None))
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
                "the tokenizer has no chat template; pass chat_template= (jinja, or 'chatml' for the usual one), or "
                "use input_mode='text' or 'tokens'"
            )
        return cls(tokenizer, source, kwargs)

    def __call__(self, chat: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tokenize: bool = False) -> Any:
        """Render one conversation.

        Raises:
            TemplateError: the template failed; its error is the cause.
        """
        try:
            return self._apply(list(chat), add_generation_prompt, tokenize)
        except Exception as error:
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def render_all(self, chats: Sequence[Sequence[Mapping[str, Any]]], add_generation_prompt: bool) -> list[str] | None:
        """Render several conversations in one call, in half the time.

        Return None if the tokenizer cannot render several at once, or if one of them fails.
        """
        if not all(chats):
            # The tokenizer refuses an empty conversation by itself, but accepts it among others.
            return None
        try:
            texts = self._apply(list(map(list, chats)), add_generation_prompt, False)
        except Exception:
            return None
        same = isinstance(texts, list) and len(texts) == len(chats) and all(isinstance(text, str) for text in texts)
        return texts if same else None

    def _apply(self, chat: list[Any], add_generation_prompt: bool, tokenize: bool) -> Any:
        template = {} if self.source is None else {"chat_template": self.source}
        return self.tokenizer.apply_chat_template(
            chat, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **template, **self.kwargs
        )

    @property
    def marks_assistant(self) -> bool:
        """Whether the template marks the assistant's text with ``{% generation %}`` blocks."""
        return self.source is not None and _GENERATION.search(self.source) is not None

    def with_marks(self, marks: Marks | None) -> Template:
        """Return the same template, with ``marks.start`` and ``marks.stop`` at the edges of its generation blocks.

        With None, nothing is written there. The tokenizer could return an assistant mask itself, but that takes longer
        than everything else.

        A `with` and an `if` block replace each generation block: like it, they have a scope. Each tag becomes two tags
        with the mark in between. The first keeps the tag's whitespace control on the left, the second the one on the
        right.
        """
        start, stop = ("", "") if marks is None else (f"{{{{ '{marks.start}' }}}}", f"{{{{ '{marks.stop}' }}}}")

        def rewrite(tag: re.Match[str]) -> str:
            left, right = tag["left"], tag["right"]
            if tag["end"]:
                return f"{{%{left} endif %}}{stop}{{% endwith {right}%}}"
            return f"{{%{left} with %}}{start}{{% if true {right}%}}"

        if not self.marks_assistant:
            return self
        assert self.source is not None
        return replace(self, source=_GENERATION.sub(rewrite, self.source))


def read_marks(text: str, marks: Marks) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks from a rendering. Return the text and ``[start, stop)`` of the assistant's characters in it.

    Raises:
        TemplateError: the marks do not come in pairs, because the template cuts up text that it has rendered.
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
            "the start and end of the chat template's {% generation %} blocks did not come out in pairs; "
            "pass a chat_template= whose blocks write straight to the output"
        )
    return "".join(parts), spans


def with_placeholder(message: Mapping[str, Any], placeholder: str) -> dict[str, Any]:
    """Return the message with a placeholder for everything it says, including tool calls and thinking."""
    return {**{key: message[key] for key in ("role", "name") if key in message}, "content": placeholder}


def joined_strings(chats: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return every str in the messages, keys included, one per line."""
    messages = chain.from_iterable(chats)
    try:
        # Fast path: a batch has thousands of messages, and most hold only text.
        return "\n".join(chain.from_iterable(chain.from_iterable(map(dict.items, messages))))
    except TypeError:
        return "\n".join(strings(chats))


def strings(value: Any) -> list[str]:
    """Return every str in nested mappings and lists, keys included."""
    found: list[str] = []
    waiting: list[Any] = [[value]]
    while waiting:
        one = waiting.pop()
        # The check for Mapping alone takes ten times as long for a dict.
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
    """Return the same nesting with `change` applied to every str value; keys and everything else stay as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value


def map_chats(function: Callable[[T], R], chats: Iterable[T]) -> list[R]:
    """Apply `function` to every conversation. If some fail, one error names them all.

    Raises:
        TemplateError: `rows` are the conversations that failed; the cause is that of the first one.
    """
    results: list[R] = []
    failed: dict[int, TemplateError] = {}
    for index, chat in enumerate(chats):
        try:
            results.append(function(chat))
        except TemplateError as error:
            failed[index] = error
    if failed:
        problems = {index: str(error) for index, error in failed.items()}
        listing = "; ".join(f"conversation {index}: {what}" for index, what in problems.items())
        raise TemplateError(listing, problems=problems) from next(iter(failed.values())).__cause__
    return results
