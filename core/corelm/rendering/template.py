"""`Template`: find a tokenizer's chat template, or ChatML, and render conversations with it.

A chat template is a program, often downloaded with a model. transformers runs it in jinja's sandbox, which keeps it
from files, modules and long ranges; a text of more than `MOST_CHARACTERS` is refused. Neither the time nor the memory
that a rendering takes is bounded: render templates that you do not trust at all in a process that the operating system
limits.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from corelm.errors import TemplateError, refuse
from corelm.validate import did_you_mean, invalid, nested_texts, shown, unencodable

T = TypeVar("T")
R = TypeVar("R")

#: The longest text that a template may write: more than ten million tokens.
MOST_CHARACTERS = 2**26

_GENERATION = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")
#: A template without this name cannot read the variable, or the field of a message.
_TOOLS, _CALLS = re.compile(r"\btools\b"), re.compile(r"\btool_calls\b")


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of these texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))) or "(?!)")


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
        """Return the given template, else the tokenizer's own. Refuse one that does not read given tools.

        `chat_template` is jinja text, the name of one of the tokenizer's templates, or "chatml".
        """
        if chat_template is not None and not isinstance(chat_template, str):
            raise invalid("chat_template", f"expected a str or None, got {shown(chat_template)}")
        for name, value in kwargs.items():
            for text in nested_texts("template_kwargs", {name: value}):
                if what := unencodable(text):
                    raise invalid("template_kwargs", f"{name}: {what}")
        if kwargs.get("tools"):
            kwargs = {**kwargs, "tools": without_nulls(kwargs["tools"])}
        if not hasattr(tokenizer, "apply_chat_template"):
            raise TemplateError("the tokenizer has no apply_chat_template; use one that has, or input_mode='text'")
        own = getattr(tokenizer, "chat_template", None)
        source: str | None = own
        if chat_template is not None:
            source = named_template(chat_template, own)
        elif isinstance(own, Mapping):
            source = own.get("tool_use" if kwargs.get("tools") and "tool_use" in own else "default")
        if not hasattr(tokenizer, "chat_template"):
            return cls(tokenizer, source, kwargs)
        if source is None:
            raise TemplateError(
                "the tokenizer has no chat template; pass chat_template= (jinja, or 'chatml' for the usual one), or "
                "use input_mode='text' or 'tokens'"
            )
        if what := unencodable(source):
            raise invalid("chat_template", what)
        if kwargs.get("tools") and not _TOOLS.search(source):
            raise TemplateError(
                "the chat template does not read tools, so the model would not be told of them; pass chat_template= "
                "with a template that reads them, or leave the tools out and describe them in a system message; then "
                "calls are text"
            )
        return cls(tokenizer, source, kwargs)

    def __call__(self, chat: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tokenize: bool = False) -> Any:
        """Render one conversation. A `TemplateError` says that the template failed or wrote too much."""
        try:
            rendered = self._apply(list(chat), add_generation_prompt, tokenize)
        except Exception as error:
            raise TemplateError(f"{self._where(chat, error)}the chat template failed: {_told(error)}") from error
        if not tokenize and not isinstance(rendered, str):
            raise TemplateError(f"the tokenizer rendered a {type(rendered).__name__} instead of a text")
        if not tokenize and len(rendered) > MOST_CHARACTERS:
            raise TemplateError(f"the chat template wrote {len(rendered):,} characters; {MOST_CHARACTERS:,} are legal")
        return rendered

    def _where(self, chat: Sequence[Mapping[str, Any]], error: Exception) -> str:
        """Return which message a template fails at: the last one of the shortest beginning that fails alike."""

        def fails(length: int) -> bool:
            try:
                self._apply(list(chat[:length]), False, False)
            except Exception as other:
                return _told(other) == _told(error)
            return False

        lengths = range(1, len(chat) + 1)
        first = bisect_left(lengths, True, key=fails)
        return f"message {first}: " if first < len(lengths) else ""

    def _apply(self, chat: list[Any], add_generation_prompt: bool, tokenize: bool) -> Any:
        template = {} if self.source is None else {"chat_template": self.source}
        apply = self.tokenizer.apply_chat_template
        return apply(chat, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **template, **self.kwargs)

    def refuse_lost_calls(self, chat: Sequence[dict[str, Any]], kept: Sequence[bool]) -> None:
        """Refuse calls that the template does not write, except in turns whose ids are kept."""
        lost = [not own and bool(turn.get("tool_calls")) for turn, own in zip(chat, kept, strict=True)]
        if not any(lost) or (self.source is not None and _CALLS.search(self.source)):
            return
        plain = self.with_marks("", "")
        without = [{**turn, "tool_calls": None} if one else turn for turn, one in zip(chat, lost, strict=True)]
        # A template may write whole messages, as JSON for example.
        if plain(chat, False) == plain(without, False):
            raise TemplateError(
                "the chat template does not read tool_calls, so the model would not see what was called; pass "
                "chat_template= with a template that reads them, or write the calls into the content"
            )

    @property
    def marks_assistant(self) -> bool:
        """Whether the template marks the assistant's text with ``{% generation %}`` blocks."""
        return self.source is not None and _GENERATION.search(self.source) is not None

    def with_marks(self, start: str, stop: str) -> Template:
        """Return the same template with a text before and one after what is in its generation blocks, and no blocks.

        The tokenizer could return an assistant mask itself, but that takes longer than everything else.

        A `with` and an `if` block replace each generation block: like it, they have a scope. Each tag becomes two tags
        with the text in between. The first keeps the tag's whitespace control on the left, the second the one on the
        right.
        """

        def rewrite(tag: re.Match[str]) -> str:
            left, right = tag["left"], tag["right"]
            if tag["end"]:
                return f"{{%{left} endif %}}{stop}{{% endwith {right}%}}"
            return f"{{%{left} with %}}{start}{{% if true {right}%}}"

        return self if self.source is None else replace(self, source=_GENERATION.sub(rewrite, self.source))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def check_encodable(chats: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Refuse conversations with text that cannot be encoded, by row and field."""
    problems: dict[int, str] = {}
    for row, chat in enumerate(chats):
        for position, message in enumerate(chat):
            for key, value in message.items():
                for text in nested_texts("history", {key: value}):
                    if what := unencodable(text):
                        problems.setdefault(row, f"message {position}, {shown(key)}: {what}")
    refuse(problems, "history")


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return the same nesting with `change` applied to every str, keys included; everything else stays as it is."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value


def map_chats(function: Callable[[T], R], chats: Iterable[T]) -> list[R]:
    """Apply `function` to every conversation. If some fail, one `TemplateError` has them all as its `rows`."""
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


# ChatML, for tokenizers without a chat template -----------------------------------------------------------------------

#: Refuses what it cannot write: tools, turns that call them, thinking, names, and text that would begin or end a turn.
#: Where `<|im_start|>` and `<|im_end|>` are special tokens, `render` has replaced them with placeholders before.
CHATML = (
    "{% if tools %}{{ raise_exception('chatml has no place for tools; pass a template that writes them') }}{% endif %}"
    "{% for message in messages %}"
    "{% for key in ('tool_calls', 'reasoning_content', 'reasoning', 'thinking', 'name') if message[key] %}"
    "{{ raise_exception('chatml has no place for ' + key + '; leave it out, or pass a template that writes it') }}"
    "{% endfor %}"
    "{% for mark in ('<|im_start|>', '<|im_end|>') if mark in message.role or mark in (message.content or '') %}"
    "{{ raise_exception('a message contains ' + mark + ', which would begin or end a turn; remove it') }}"
    "{% endfor %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ (message.content or '') + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ (message.content or '') + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: The templates that core has, by name.
TEMPLATES = {"chatml": CHATML}

#: A turn. The last one may lack its end, as the text of an answer does.
_TURN = re.compile(r"<\|im_start\|>(?P<role>[^\n]*)\n(?P<content>.*?)(?P<end><\|im_end\|>(?:\n|\Z)|\Z)", re.DOTALL)


def named_template(given: str, own: Any) -> str:
    """Return the jinja text of a template: `given` itself, or the one in `own` or of core that has this name.

    What is neither a name nor jinja text is refused: rendered, it would stand for every conversation.
    """
    named = {**TEMPLATES, **own} if isinstance(own, Mapping) else TEMPLATES
    if given not in named and "{" not in given:
        known = sorted(named)
        raise TemplateError(
            f"no chat template is named {given!r}; pass jinja text (not the path of a file), or one of the names "
            f"{', '.join(map(repr, known))}{did_you_mean(given, known)}"
        )
    return named.get(given, given)


def read_chatml(text: str) -> list[dict[str, str]]:
    """Return the messages of a conversation that ChatML wrote. A generation prompt at the end is left out.

    Raises:
        ValueError: the text is not ChatML; the message says where.
    """
    messages: list[dict[str, str]] = []
    at = 0
    while at < len(text):
        turn = _TURN.match(text, at)
        if turn is None:
            raise ValueError(f"expected <|im_start|> and a role at character {at}, got {text[at : at + 20]!r}")
        if "<|im_start|>" in turn["content"]:
            raise ValueError(f"the turn at character {at} does not end with <|im_end|> and a newline")
        if turn["content"] or turn["end"]:
            messages.append({"role": turn["role"], "content": turn["content"]})
        at = turn.end()
    return messages


# Nulls that come from a column of a data set: Arrow gives every object in it the keys of all the others. Only a null
# that cannot be meant is left out: one that JSON Schema does not allow in a tool, and an argument that is not among the
# parameters of the tool that is called.


def without_nulls(schema: Any) -> Any:
    """Drop the keys of a tool, or of a part of it, that are null where JSON Schema allows no null."""
    if isinstance(schema, list):
        return [without_nulls(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    # A default or a constant may be null, unless it is of a type that is not.
    kind = schema.get("type")
    nullable = () if isinstance(kind, str) and kind != "null" else ("default", "const")
    return {key: without_nulls(value) for key, value in schema.items() if value is not None or key in nullable}


def without_foreign_arguments(messages: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
    """Drop null arguments of calls that the called tool does not declare. Functions do not say what they declare."""
    known = dict(filter(None, map(_parameters, tools))) if isinstance(tools, Sequence) else {}

    def own(name: Any, given: Any) -> Any:
        if (declared := known.get(str(name))) is None or not isinstance(given, Mapping):
            return given
        return {key: value for key, value in given.items() if value is not None or key in declared}

    return [with_arguments(message, own) for message in messages] if known else messages


def with_arguments(message: dict[str, Any], change: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return a message with what `change` makes of the name and the arguments of each of its calls."""

    def changed(call: Any) -> Any:
        holder = call.get("function", call)
        if not isinstance(holder, Mapping) or "arguments" not in holder:
            return call
        holder = {**holder, "arguments": change(holder.get("name"), holder["arguments"])}
        return {**call, "function": holder} if "function" in call else holder

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(changed, calls)]} if calls else message


def _parameters(tool: Any) -> tuple[str, frozenset[str]] | None:
    """Return the name of a tool and of its parameters; None if it does not say them."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    properties = (function.get("parameters") or {}).get("properties") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(properties, Mapping):
        return None
    return str(function.get("name")), frozenset(properties)
