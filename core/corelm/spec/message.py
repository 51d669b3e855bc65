"""`Message`: one turn of a conversation; `Chat`: a conversation."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from corelm.errors import InvalidRequestError

#: The keys of a message that have a field of their own; every other key goes into `Message.extra`.
FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "token_ids")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: whose turn it is: `system`, `user`, `assistant`, `tool`, or what else the template knows.
        content: the text; None for a turn that only calls tools.
        tool_calls: the calls an assistant's turn makes. tool_call_id, name: which of them a tool's turn answers.
        token_ids: for a turn that was sampled, the ids the engine returned, its EOS included.
        extra: whatever else the template reads (`reasoning_content`, …), under its own key.

    Raises:
        InvalidRequestError: a field of the wrong type; `field` names it.
    """

    role: str
    content: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    token_ids: tuple[int, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise _wrong("role", "a str", self.role)
        if self.content is not None and not isinstance(self.content, str):
            parts = " (a list of parts, as for images, is out of scope)" if isinstance(self.content, list) else ""
            raise _wrong("content", f"a str or None{parts}", self.content)
        if self.tool_calls is not None:
            if isinstance(self.tool_calls, str) or not isinstance(self.tool_calls, Sequence):
                raise _wrong("tool_calls", "a list of dicts or None", self.tool_calls)
            object.__setattr__(self, "tool_calls", tuple(self.tool_calls))
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", _token_ids(self.token_ids))

    @classmethod
    def from_dict(cls, message: Message | Mapping[str, Any]) -> Message:
        """From the field's usual dict, unknown keys kept; a `Message` is returned as it is."""
        if isinstance(message, Message):
            return message
        if not isinstance(message, Mapping):
            raise _wrong("message", "a Message or a dict with a role", message)
        known = {key: message[key] for key in FIELDS if key in message}
        if "role" not in known:
            raise InvalidRequestError(f"role is missing; the message has: {', '.join(map(str, message))}", field="role")
        if known.get("tool_calls"):
            known["tool_calls"] = deepcopy(known["tool_calls"])
        extra = {key: deepcopy(value) for key, value in message.items() if key not in FIELDS}
        return cls(**known, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """The inverse of `from_dict`: `role` and `content` always, the rest where set. Shares nothing with it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls is not None:
            message["tool_calls"] = deepcopy(list(self.tool_calls))
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        if self.token_ids is not None:
            message["token_ids"] = list(self.token_ids)
        if self.extra:
            message |= deepcopy(dict(self.extra))
        return message

    def for_template(self) -> dict[str, Any]:
        """What a chat template sees: no ids, and no key without a value, since templates print a None."""
        if self.content is not None and not (self.tool_calls or self.tool_call_id or self.name or self.extra):
            # As most messages are; there are thousands in a batch.
            return {"role": self.role, "content": self.content}
        message = self.to_dict()
        message.pop("token_ids", None)
        return {key: value for key, value in message.items() if value is not None}


Chat = tuple[Message, ...]


def _token_ids(value: Any) -> tuple[int, ...]:
    try:
        ids = tuple(value.tolist() if isinstance(value, torch.Tensor) else value)
        if not set(map(type, ids)) <= {int}:
            ids = tuple(map(operator.index, ids))
    except TypeError:
        raise _wrong("token_ids", "ids, one after another, or None", value) from None
    if ids and min(ids) < 0:
        raise InvalidRequestError(f"token_ids: an id is not negative, but {min(ids)} is there", field="token_ids")
    return ids


def _wrong(name: str, expected: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: expected {expected}, got {type(value).__name__}", field=name)
