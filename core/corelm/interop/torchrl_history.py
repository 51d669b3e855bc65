"""Conversations between the two libraries, both ways: a row of ours is a conversation, a row of TorchRL's a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl.data import History as TheirHistory
from torchrl.modules.llm.policies import ChatHistory as TheirChatHistory

from corelm.containers.classes import ChatHistory
from corelm.containers.history import History
from corelm.errors import InvalidRequestError
from corelm.spec.message import Message

PARTS = ("prompt", "response", "full")


def from_torchrl(history: Any) -> Any:
    """A `History` of TorchRL, batch ``[*batch, messages]``, as ours of batch ``[*batch]``; its `ChatHistory` as ours.

    `role`, `content` and `tool_calls` are taken over, and what `to_torchrl` sent along (sampled ids, names, …) comes
    back, unless something has been changed since. `tool_responses`, and `is_complete` where it is False,
    go into `Message.extra`. Placeholders (role ``<none>``) are left out. Ours is returned as it is.

    Raises:
        InvalidRequestError: content that is no text, a lone message, or something else altogether.
    """
    if isinstance(history, (History, ChatHistory)):
        return history
    if isinstance(history, TheirChatHistory):
        return ChatHistory(**_parts(history, from_torchrl), batch_size=history.batch_size)
    if not isinstance(history, TheirHistory) or not history.ndim:
        raise InvalidRequestError(
            f"history: expected a History of TorchRL, [*batch, messages], or its ChatHistory; got {_what(history)}",
            field="history",
        )
    return History.of(_chats(history), history.batch_size[:-1])


def to_torchrl(history: Any) -> Any:
    """Our `History` of batch ``[*batch]`` as TorchRL's of batch ``[*batch, messages]``; our `ChatHistory` as its own.

    Its messages have no place for sampled ids, `name`, `tool_call_id` and other extra keys. These go along with the
    content, which is then a str that remembers its message: they survive whatever moves, stacks or pickles it, and
    `from_torchrl` finds them. They are lost where a content is written anew, and in a memmap, which holds plain text. A
    content of None reads as ``""`` there. TorchRL's is returned as it is.

    Raises:
        InvalidRequestError: no conversations, or one without a message, which TorchRL cannot hold.
    """
    if isinstance(history, (TheirHistory, TheirChatHistory)):
        return history
    if isinstance(history, ChatHistory):
        return TheirChatHistory(**_parts(history, to_torchrl), batch_size=history.batch_size)
    if not isinstance(history, History):
        raise InvalidRequestError(
            f"history: expected a History or a ChatHistory, got {_what(history)}", field="history"
        )
    chats = history.chats
    empty = {row: "a conversation without messages" for row, chat in enumerate(chats) if not chat}
    if empty or not chats:
        raise InvalidRequestError(
            "history: TorchRL's History holds at least one conversation, and at least one message in each",
            field="history",
            problems=empty,
        )
    level: Sequence[Any] = [[_their_fields(message) for message in chat] for chat in chats]
    for width in reversed(history.batch_size[1:]):
        level = [level[at : at + width] for at in range(0, len(level), width)]
    return TheirHistory.from_chats(level if history.ndim else level[0])


class _Said(str):
    """The content of a message that has more to it than TorchRL has fields for, and that message."""

    __slots__ = ("message",)
    message: Message

    def __new__(cls, content: str, message: Message) -> _Said:
        said = super().__new__(cls, content)
        said.message = message
        return said

    # tensordict keeps one of two values that are equal, and the ids of the other would be lost.
    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) and (not isinstance(other, _Said) or self.message == other.message)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> Any:
        return _Said, (str(self), self.message)


def _their_fields(message: Message) -> dict[str, Any]:
    fields = {
        "role": message.role,
        "content": message.content or "",
        "is_complete": message.extra.get("is_complete", True),
        "tool_calls": message.to_dict().get("tool_calls") or None,
        "tool_responses": message.extra.get("tool_responses") or None,
    }
    if Message.from_dict(_our_fields(fields)) != message:
        fields["content"] = _Said(fields["content"], message)
    return fields


def _our_fields(fields: dict[str, Any]) -> Message | dict[str, Any]:
    content, calls = fields["content"], fields.get("tool_calls") or None
    if isinstance(content, _Said):
        sent = _their_fields(content.message)
        if all(fields.get(name) == value for name, value in sent.items()):
            return content.message
        content = str(content)
    given = {
        "tool_calls": calls,
        "tool_responses": fields.get("tool_responses") or None,
        "is_complete": None if fields.get("is_complete", True) else False,
    }
    return {"role": fields["role"], "content": content, **{k: v for k, v in given.items() if v is not None}}


def _chats(history: TheirHistory) -> list[list[Message | dict[str, Any]]]:
    """The conversations, flat, in C order."""
    if history.ndim > 1:
        return [chat for part in history.unbind(0) for chat in _chats(part)]
    messages = history.tolist(tolist_first=True)
    return [[_our_fields(fields) for fields in messages if fields["role"] != "<none>"]]


def _parts(history: Any, convert: Any) -> dict[str, Any]:
    found = {name: getattr(history, name) for name in PARTS}
    return {name: convert(part) for name, part in found.items() if part is not None}


def _what(value: Any) -> str:
    return f"{type(value).__name__} {list(getattr(value, 'batch_size', ()))}"
