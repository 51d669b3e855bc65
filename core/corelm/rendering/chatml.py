"""ChatML, for tokenizers without a chat template: the template, the reader of such text, and templates by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from corelm.errors import TemplateError
from corelm.validate import did_you_mean

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

    Args:
        own: the tokenizer's own templates, if they have names.

    Raises:
        TemplateError: `given` is neither a name nor jinja text. Rendered, it would stand for every conversation.
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
