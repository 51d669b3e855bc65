"""Convert conversations from and to TorchRL: there a row is a message, in a core `History` a row is a conversation.

TorchRL's `Text`, `Tokens` and `Masks` have the fields of core's, and are converted as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import lazy_stack
from torchrl.data import History as TheirHistory
from torchrl.modules.llm.policies import ChatHistory as TheirChatHistory
from torchrl.modules.llm.policies import Masks as TheirMasks
from torchrl.modules.llm.policies import Text as TheirText
from torchrl.modules.llm.policies import Tokens as TheirTokens

from corelm import ChatHistory, History, Masks, Text, Tokens
from corelm.application import flat
from corelm.errors import InvalidRequestError
from corelm.spec import Message

PARTS = ("prompt", "response", "full")
MASKS = ("all_attention_mask", "all_assistant_mask")

#: The role of TorchRL's empty messages, which make rows with different numbers of messages equally long.
PLACEHOLDER = "<none>"


def from_torchrl(history: Any) -> Any:
    """Convert a `History` of TorchRL, batch ``[*batch, messages]``, to a core `History` of batch ``[*batch]``.

    A `ChatHistory` of TorchRL is converted part by part. Its `Text`, `Tokens` and `Masks` become core's, in the same
    layout. Core's own classes are returned unchanged. TorchRL's `LogProbs` are not converted: they do not say which
    positions were scored.

    `role`, `content` and `tool_calls` are copied. The other fields that `to_torchrl` attached (sampled ids, names, …)
    are restored, unless the message was changed since. `tool_responses`, and `is_complete` if it is False, are stored
    in `Message.extra`. Placeholders (role ``<none>``) are left out.

    Raises:
        InvalidRequestError: the content of a message is not a string, or `history` is a single message or another type.
    """
    if isinstance(history, (History, ChatHistory, Text, Tokens, Masks)):
        return history
    if isinstance(history, TheirChatHistory):
        return ChatHistory(**_parts(history, from_torchrl), batch_size=history.batch_size)
    if isinstance(history, TheirText):
        return Text(**_parts(history, _strings), batch_size=history.batch_size)
    if isinstance(history, (TheirTokens, TheirMasks)):
        return _tensors(history)
    if not isinstance(history, TheirHistory) or not history.ndim:
        raise InvalidRequestError(
            "history: expected TorchRL's History, [*batch, messages], or its ChatHistory, Text, Tokens or Masks; "
            f"got {_type_and_batch(history)}",
            field="history",
        )
    return History.of(_chats(history), history.batch_size[:-1])


def to_torchrl(history: Any) -> Any:
    """Convert a core `History` of batch ``[*batch]`` to TorchRL's `History` of batch ``[*batch, messages]``.

    A core `ChatHistory` is converted part by part. TorchRL's classes are returned unchanged.

    TorchRL's messages have no fields for sampled ids, `name`, `tool_call_id` and other extra keys. They are attached to
    the content, which becomes a `str` that carries its message: they survive moving, stacking and pickling, and
    `from_torchrl` restores them. They are lost if the content is replaced, and in a memmap, which stores plain text. A
    content of None becomes ``""``.

    Raises:
        InvalidRequestError: there is no conversation, or one has no messages; TorchRL can hold neither.
    """
    if isinstance(history, (TheirHistory, TheirChatHistory)):
        return history
    if isinstance(history, ChatHistory):
        return TheirChatHistory(**_parts(history, to_torchrl), batch_size=history.batch_size)
    if not isinstance(history, History):
        raise InvalidRequestError(
            f"history: expected a History or a ChatHistory, got {_type_and_batch(history)}", field="history"
        )
    chats = history.chats
    empty = {row: "a conversation without messages" for row, chat in enumerate(chats) if not chat}
    if empty or not chats:
        raise InvalidRequestError(
            "history: TorchRL's History needs at least one conversation, and at least one message in each",
            field="history",
            problems=empty,
        )
    level: Sequence[Any] = [[_their_fields(message) for message in chat] for chat in chats]
    for width in reversed(history.batch_size[1:]):
        level = [level[at : at + width] for at in range(0, len(level), width)]
    return TheirHistory.from_chats(level if history.ndim else level[0])


def with_response(prompt: Any, response: History) -> TheirChatHistory:
    """Return TorchRL's `ChatHistory` of prompts, ``[*batch, messages]`` or core's, and core's responses, ``[*batch]``.

    TorchRL's prompts stay the same objects, placeholders included, and `full` extends them. Rows with different numbers
    of messages get placeholders before the response, because TorchRL's transforms read the last message of all rows at
    ``history[..., -1]`` and append along the last dimension.
    """
    asked, answer = to_torchrl(prompt), to_torchrl(response)
    longest = max(row.shape[-1] for row in _conversations(asked))
    full = _extended(asked, answer, longest)
    return TheirChatHistory(prompt=asked, response=answer, full=full, batch_size=response.batch_size)


class _ContentWithMessage(str):
    """The content of a message, and the message itself, if TorchRL's fields cannot represent all of it."""

    __slots__ = ("message",)
    message: Message

    def __new__(cls, content: str, message: Message) -> _ContentWithMessage:
        carrier = super().__new__(cls, content)
        carrier.message = message
        return carrier

    # tensordict stores equal values once, so contents with different messages must not be equal.
    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) and (not isinstance(other, _ContentWithMessage) or self.message == other.message)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> Any:
        return _ContentWithMessage, (str(self), self.message)


def _their_fields(message: Message) -> dict[str, Any]:
    fields = {
        "role": message.role,
        "content": message.content or "",
        "is_complete": message.extra.get("is_complete", True),
        "tool_calls": message.to_dict().get("tool_calls") or None,
        "tool_responses": message.extra.get("tool_responses") or None,
    }
    if Message.from_dict(_our_fields(fields)) != message:
        fields["content"] = _ContentWithMessage(fields["content"], message)
    return fields


def _our_fields(fields: dict[str, Any]) -> Message | dict[str, Any]:
    content, calls = fields["content"], fields.get("tool_calls") or None
    if isinstance(content, _ContentWithMessage):
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


def _conversations(history: TheirHistory) -> list[TheirHistory]:
    """Return the conversations, each ``[messages]``, flat, in C order."""
    return [history] if history.ndim == 1 else [row for part in history.unbind(0) for row in _conversations(part)]


def _extended(prompt: TheirHistory, response: TheirHistory, length: int) -> TheirHistory:
    if prompt.ndim > 1:
        parts = zip(prompt.unbind(0), response.unbind(0), strict=True)
        return lazy_stack([_extended(*part, length) for part in parts])
    missing = length - prompt.shape[-1]
    fill = [TheirHistory(role=PLACEHOLDER, content="") for _ in range(missing)]
    return lazy_stack([*prompt.unbind(0), *fill, *response.unbind(0)])


def _chats(history: TheirHistory) -> list[list[Message | dict[str, Any]]]:
    """Return the messages of every conversation, without placeholders, flat, in C order."""
    return [
        [_our_fields(fields) for fields in row.tolist(tolist_first=True) if fields["role"] != PLACEHOLDER]
        for row in _conversations(history)
    ]


def _parts(history: Any, convert: Any) -> dict[str, Any]:
    found = {name: getattr(history, name) for name in PARTS}
    return {name: convert(part) for name, part in found.items() if part is not None}


def _strings(value: Any) -> Any:
    """Return a plain str, or plain lists of str. TorchRL's lists are tensordict's."""
    return value if isinstance(value, str) else [_strings(item) for item in value]


def _tensors(theirs: Any) -> Any:
    """Return TorchRL's `Tokens` or `Masks` as core's, in the same layout. Rows without a mark are dense, as in core."""
    cls, names = (Tokens, PARTS) if isinstance(theirs, TheirTokens) else (Masks, MASKS)
    if theirs.ndim and not all(flat(theirs.padded)):
        return lazy_stack([_tensors(row) for row in theirs.unbind(0)])
    found = {name: value for name in names if (value := getattr(theirs, name)) is not None}
    return cls(**found, padded=theirs.padded is not False, batch_size=theirs.batch_size)


def _type_and_batch(value: Any) -> str:
    return f"{type(value).__name__} {list(getattr(value, 'batch_size', ()))}"
