"""Conversations: `Message`, `Chat`, and `History`, a batch of them that slices, stacks and saves as a TensorClass."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass

from corelm.deferred import Objects, deferred_objects, nested, unmade
from corelm.errors import InvalidRequestError
from corelm.templates import Template, by_row

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


class History(TensorClass["nocast"]):
    """A batch of conversations; its batch shape is theirs, and a row is one whole conversation.

    ``History.from_chats([chat_a, chat_b])`` has batch ``(2,)``. Make one with `from_chats` or `of`, read it with
    `chats` or `to_chats`; `append` and `extend` give a new History unless told ``inplace=True``.
    """

    # A row is {"messages": [dict, …]}: one non-tensor, since a TensorClass a message costs six times as much. Plain
    # data and not `Message` objects, so that memmap writes JSON where it would pickle; in a dict, since tensordict
    # would read lists of equal length as a batch dimension.
    conversation: Any

    @classmethod
    def from_chats(cls, chats: Sequence[Any]) -> History:
        """From lists of messages, each a dict or a `Message`.

        One chat (a list of messages) has batch ``()``, a list of chats ``(B,)``, a list of lists of chats ``(B, n)``,
        and so on; ``[]`` is no chats, batch ``(0,)``, and ``[[], []]`` two chats without a message yet.

        Raises:
            InvalidRequestError: a list of uneven shape, or messages at fault; `rows` has the conversations.
        """
        flat, shape = _flatten(chats)
        return cls.of(flat, shape)

    @classmethod
    def of(cls, chats: Iterable[Sequence[Message | Mapping[str, Any]]], batch_size: Sequence[int]) -> History:
        """From a flat sequence of chats, in C order of `batch_size`."""
        return cls._wrap(_messages(chats), tuple(batch_size))

    @property
    def chats(self) -> tuple[Chat, ...]:
        """The conversations, flat, in C order of the batch."""
        value = self._tensordict.get("conversation")
        source = unmade(value)
        if isinstance(source, Objects) and isinstance(source.values, _Conversations):
            return tuple(tuple(map(_own, chat)) for chat in source.values.chats)
        held = [value.data] * self._count if isinstance(value, NonTensorData) else _flat(value.tolist(), self.ndim)
        return tuple(tuple(map(Message.from_dict, row["messages"])) for row in held)

    def to_chats(self) -> list[Any]:
        """Lists of dicts: the inverse of `from_chats`. `token_ids` are there for turns that have them."""
        return nested(iter([[message.to_dict() for message in chat] for chat in self.chats]), tuple(self.batch_size))

    def append(self, message: Message | Mapping[str, Any] | Sequence[Any], inplace: bool = False) -> History:
        """Add one message to every conversation: the same for all, or a list of them, nested as the batch is.

        Raises:
            InvalidRequestError: not one message per conversation, or a message at fault.
        """
        if isinstance(message, (Message, Mapping)):
            return self._add([[message]] * self._count, inplace)
        each = _leaves(message, tuple(self.batch_size)) if self.ndim else None
        if each is None:
            raise self._mismatch("append: expected one message, or one per conversation (extend takes several)")
        return self._add([[one] for one in each], inplace)

    def extend(self, messages: History | Sequence[Any], inplace: bool = False) -> History:
        """Add several messages to every conversation: one list for all, or lists (or a History) shaped as the batch.

        Raises:
            InvalidRequestError: not one list per conversation, or a message at fault.
        """
        added, shape = _flatten(messages.to_chats() if isinstance(messages, History) else messages, top=False)
        if shape == ():
            return self._add(added * self._count, inplace)
        if shape != tuple(self.batch_size):
            raise self._mismatch(
                f"extend: expected a list of messages, or one per conversation, got a batch of {shape}"
            )
        return self._add(added, inplace)

    def apply_chat_template(
        self,
        tokenizer: Any,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """What `tokenizer` makes of every conversation: a str for batch ``()``, a list for ``(B,)``, and so on.

        With ``tokenize=True``, what the tokenizer makes of the text; sampled ids are kept by `LLMPolicy`, not here.

        Raises:
            TemplateError: no template, or one that fails; `rows` has the conversations.
        """
        template = Template.find(tokenizer, chat_template, kwargs)

        def one(chat: Chat) -> Any:
            return template([message.for_template() for message in chat], add_generation_prompt, tokenize)

        return nested(iter(by_row(one, self.chats)), tuple(self.batch_size))

    # How rows are held -----------------------------------------------------------------------------------------------

    @classmethod
    def _wrap(cls, chats: list[Chat], shape: tuple[int, ...]) -> History:
        if math.prod(shape) != len(chats):
            raise InvalidRequestError(f"{len(chats)} conversations do not fill a batch of {shape}", field="batch_size")
        return cls(conversation=_stack(chats, shape), batch_size=shape)

    def _mismatch(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"{what}; the history's batch is {tuple(self.batch_size)}", field="messages")

    @property
    def _count(self) -> int:
        return math.prod(self.batch_size)

    def _add(self, added: Sequence[Sequence[Any]], inplace: bool) -> History:
        chats = [before + new for before, new in zip(self.chats, _messages(added), strict=True)]
        shape = tuple(self.batch_size)
        return self.set("conversation", _stack(chats, shape)) if inplace else self._wrap(chats, shape)


class _Conversations(Sequence[dict[str, Any]]):
    """Chats, read as the rows that a History holds. Most are only read as chats again, and so never become rows."""

    def __init__(self, chats: list[Chat]) -> None:
        self.chats = chats

    def __len__(self) -> int:
        return len(self.chats)

    def __getitem__(self, index: Any) -> Any:
        return {"messages": [message.to_dict() for message in self.chats[index]]}


def _stack(chats: list[Chat], shape: tuple[int, ...]) -> NonTensorData | NonTensorStack:
    if not chats:
        # A stack of nothing can be neither concatenated nor memmapped; one carrier with an empty batch can.
        return NonTensorData(None, batch_size=shape)
    return deferred_objects(_Conversations(chats), shape)


def _own(message: Message) -> Message:
    """A message that shares no dict with another: what it holds of them can be written to."""
    return Message.from_dict(message.to_dict()) if message.tool_calls or message.extra else message


def _flat(value: Any, depth: int) -> list[Any]:
    """What stands `depth` lists deep."""
    return [value] if not depth else [leaf for item in value for leaf in _flat(item, depth - 1)]


def _leaves(value: Any, shape: tuple[int, ...]) -> list[Any] | None:
    """The items of lists nested to `shape`, flat; None for lists of another shape."""
    if not shape:
        return [value]
    if not isinstance(value, (list, tuple)) or len(value) != shape[0]:
        return None
    parts = [_leaves(item, shape[1:]) for item in value]
    return None if None in parts else [leaf for part in parts if part is not None for leaf in part]


def _messages(chats: Iterable[Sequence[Message | Mapping[str, Any]]]) -> list[Chat]:
    found: list[Chat] = []
    problems: dict[int, str] = {}
    for row, chat in enumerate(chats):
        messages: list[Message] = []
        for position, message in enumerate(chat):
            try:
                messages.append(_own(message) if isinstance(message, Message) else Message.from_dict(message))
            except InvalidRequestError as error:
                problems.setdefault(row, f"message {position}: {error}")
        found.append(tuple(messages))
    if problems:
        listing = "; ".join(f"conversation {row}, {what}" for row, what in problems.items())
        raise InvalidRequestError(listing, field="history", problems=problems)
    return found


def _flatten(value: Any, top: bool = True) -> tuple[list[Any], tuple[int, ...]]:
    """Nested lists → their chats in C order, and the batch shape."""
    if not isinstance(value, (list, tuple)):
        raise _wrong("history", "a list of messages, or lists of such lists", value)
    if any(isinstance(item, (Message, Mapping)) for item in value) or not (value or top):
        return [value], ()
    parts = [_flatten(item, top=False) for item in value]
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        found = ", ".join(map(str, sorted(shapes)))
        raise InvalidRequestError(
            f"lists side by side must hold equally many chats; found batches {found}", field="history"
        )
    return [chat for chats, _ in parts for chat in chats], (len(value), *(shapes.pop() if shapes else ()))


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
