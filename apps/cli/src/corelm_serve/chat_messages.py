"""Read the messages of clients, as any client library writes them, and find those that repeat an earlier answer.

Clients do not send messages back as they got them: they add and drop keys, and write the JSON of tool calls in another
order. `said` reads a message, and `MessageKey` compares what messages say:

- `content`: None, "" and a missing key are the same. A list of text parts is the same as its texts, joined by newlines.
  Any other difference counts, whitespace as well.
- `tool_calls`: names and arguments count. The arguments are compared as JSON, so neither the order of keys nor the
  spaces count, and 1.0 is 1. `index` and the id of a call do not count; of answers with the same calls, the one whose
  ids were sent back is preferred.
- `reasoning_content`, `reasoning` or `thinking` of an answer: may be left out. What is sent must be what was told.
- Other keys of an answer, such as `refusal`, `annotations`, `audio` and `function_call: null`, do not count. Those of
  other messages count if they hold anything, because a chat template may read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from corelm.errors import InvalidRequestError, refuse
from corelm.spec import Chat, Message
from corelm.spec.message import with_object
from corelm.validate import as_list, invalid, nested_texts, shown

#: What API clients add to messages. No chat template reads these.
_OF_CLIENTS = frozenset({"refusal", "annotations", "audio", "parsed", "provider_specific_fields"})
_REASONING = ("reasoning_content", "reasoning", "thinking")


def said(message: Message | Mapping[str, Any]) -> Message:
    """Return a message as a chat template reads it.

    Values that are empty are left out, text parts are joined, and arguments of tool calls become objects, because chat
    templates write these. Ids that the client sent are left out: only those that
    the engine sampled count.
    """
    given = message.to_dict() if isinstance(message, Message) else message
    if not isinstance(given, Mapping):
        return Message.from_dict(given)  # raises
    kept = {
        key: value
        for key, value in given.items()
        if key in ("role", "content") or (key not in _OF_CLIENTS and key != "token_ids" and not _is_empty(value))
    }
    calls = kept.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        kept["tool_calls"] = [with_object(call) if isinstance(call, Mapping) else call for call in calls]
    return Message.from_dict(kept)


@dataclass(frozen=True, slots=True)
class MessageKey:
    """What a message says, as texts that are equal if two messages say the same.

    Attributes:
        spoken: what must be equal for any two messages: role, name, content, calls without their ids.
        reasoning: the thinking of an assistant's turn; "" if it has none.
        rest: everything else: the ids of the calls, and the keys that only some templates read.
    """

    spoken: str
    reasoning: str
    rest: str

    @classmethod
    def of(cls, message: Message) -> MessageKey:
        """Return the key of a message that `said` returned."""
        spoken: list[Any] = [message.role, message.name, message.content or "", message.tool_call_id]
        spoken.append([_call(call) for call in message.tool_calls or ()])
        reasoning = next((message.extra[name] for name in _REASONING if message.extra.get(name)), "")
        ids = [call.get("id") for call in message.tool_calls or ()]
        others = {key: value for key, value in message.extra.items() if key not in _REASONING}
        texts = (canonical(spoken), canonical(reasoning) if reasoning else "", canonical([ids, others]))
        return cls(*texts)

    def repeats(self, told: MessageKey) -> bool:
        """Return whether this message, sent by a client, repeats an answer. Their `spoken` must be equal."""
        return self.reasoning in ("", told.reasoning)

    def same(self, other: MessageKey) -> bool:
        """Return whether nothing differs. Their `spoken` must be equal."""
        return (self.reasoning, self.rest) == (other.reasoning, other.rest)

    def likeness(self, told: MessageKey) -> int:
        """Return how much of what need not be equal is equal: 0 to 2."""
        return (self.reasoning == told.reasoning) + (self.rest == told.rest)


def read_messages(messages: Sequence[Message | Mapping[str, Any]]) -> Chat:
    """Return the messages of a request, as `said` reads them.

    Raises:
        InvalidRequestError: there are none, or some are malformed; `rows` are the messages at fault.
    """
    given = as_list(messages)
    if not isinstance(given, list) or not given:
        raise invalid("messages", f"expected a list with at least one message, got {shown(messages)}")
    read, problems = [], {}
    for number, message in enumerate(given):
        try:
            read.append(said(message))
        except InvalidRequestError as error:
            problems[number] = str(error)
    refuse(problems, "messages")
    return tuple(read)


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a request; an empty list is the same as none.

    Raises:
        InvalidRequestError: it is not a list of dicts, or they are nested too deep.
    """
    given = [] if tools is None else as_list(tools)
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise invalid("tools", f"expected a list of dicts or None, got {shown(tools)}")
    nested_texts("tools", given)  # refuses what cannot be walked
    return tuple(deepcopy(given))


def digests_of_messages(tools: Sequence[Mapping[str, Any]], keys: Sequence[MessageKey]) -> list[bytes]:
    """Return for each message what stands for it, the messages before it and the tools."""
    digests, digest = [], chained(b"", canonical(tools))
    for key in keys:
        digest = chained(digest, key.spoken)
        digests.append(digest)
    return digests


def chained(before: bytes, text: str) -> bytes:
    """Return a digest of everything before and a text: equal digests mean equal beginnings."""
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def canonical(value: Any) -> str:
    """Return JSON that is equal for equal values, in any order of their keys; 1.0 is 1."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, tuple, Mapping)) and not value)


def _call(call: Mapping[str, Any]) -> Any:
    """Return what a call says without its id and its index. Calls that are not written as OpenAI's count whole."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return {key: value for key, value in call.items() if key not in ("id", "index")}
    return [function.get("name"), function.get("arguments")]
