"""What a line of ``corelm generate`` asks: an answer to a text or to a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corelm.errors import InvalidRequestError
from corelm.spec import Chat
from corelm_cli import lines
from corelm_cli.lines import Id, Line

KEYS = ("id", "prompt", "messages", "tools", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(Line):
    """A line to answer: either `text` or `chat` is given.

    Attributes:
        text: the prompt, if it is a text.
        chat: the prompt, if it is a conversation.
        tools: tools for the chat template.
    """

    text: str | None = None
    chat: Chat | None = None
    tools: list[Any] | None = None


def read_prompt(number: int, name: Id, row: dict[str, Any]) -> Prompt:
    """Read a line with `prompt`, or with `messages` and optionally `tools`."""
    lines.check_keys(row, KEYS)
    if ("prompt" in row) == ("messages" in row):
        raise InvalidRequestError(f"expected either `prompt` or `messages`, got {', '.join(row) or 'neither'}")
    return Prompt(
        line=number,
        id=name,
        text=lines.text(row, "prompt") if "prompt" in row else None,
        chat=lines.chat(row),
        tools=lines.tools(row),
        metadata=row.get("metadata"),
        **lines.asked(row, ("prompt", "messages", "tools")),
    )
