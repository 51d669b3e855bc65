"""Conversations: `Message`, `Chat`, and `History`, a batch of them that slices, stacks and saves as a TensorClass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorClass

from corelm.errors import InvalidRequestError
from corelm.rendering.template import Template, map_chats
from corelm.spec.message import Chat, Message
from corelm.tensors.lazy_rows import FlatObjects, flat_source, lazy_objects, nested
from corelm.validate import invalid


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
        source = flat_source(value)
        if isinstance(source, FlatObjects) and isinstance(source.values, _Conversations):
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

        return nested(iter(map_chats(one, self.chats)), tuple(self.batch_size))

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
    return lazy_objects(_Conversations(chats), shape)


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
        raise invalid("history", f"expected a list of messages, or lists of such lists, got {type(value).__name__}")
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
