"""`Message`: one turn of a conversation; `Chat`: a conversation."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
import uuid
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from corelm.errors import InvalidRequestError, described, level_of_caller
from corelm.validate import invalid, nested_texts, shown, token_ids

#: The keys of a message that are fields of `Message`; every other key goes into `Message.extra`.
FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "token_ids", "begun")
_ROLES = ("system", "developer", "user", "assistant", "tool")
#: The types of the parts of a content that are text.
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: `system`, `user`, `assistant`, `tool`, or another role that the template knows.
        content: the text; None for a turn that only calls tools.
        tool_calls: the calls that an assistant's turn makes.
        tool_call_id: for a tool's turn, the id of the call that it answers.
        name: for a tool's turn, the name of the tool; for others, the name of the speaker.
        token_ids: for a sampled turn, the ids that the engine returned, including the EOS.
        begun: for a turn whose beginning was given and whose rest was sampled (`continue_final_message`), the
            turn as it was given, as a dict. `token_ids` then holds the rest.
        extra: other values that the template reads (`reasoning_content`, …), each under its own key.

    Raises:
        InvalidRequestError: a field of the wrong type, an id that no vocabulary has, or `tool_calls` or
            `extra` that are nested too deep or hold themselves; `field` names it.
    """

    role: str
    content: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    token_ids: tuple[int, ...] | None = None
    begun: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise _type_error("role", "a str", self.role)
        if self.content is not None and not isinstance(self.content, str):
            parts = " (`Message.from_dict` joins lists of text parts)" if isinstance(self.content, list) else ""
            raise _type_error("content", f"a str or None{parts}", self.content)
        if self.tool_calls is not None:
            calls = self.tool_calls
            listed = isinstance(calls, Sequence) and not isinstance(calls, (str, bytes))
            if not listed or not all(isinstance(call, Mapping) for call in calls):
                raise _type_error("tool_calls", "a list of dicts or None", calls)
            nested_texts("tool_calls", {"tool_calls": calls})  # refuses what cannot be walked
            object.__setattr__(self, "tool_calls", tuple(calls))
        for name in ("tool_call_id", "name"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _type_error(name, "a str or None", value)
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", token_ids("token_ids", self.token_ids))
        if self.begun is not None:
            if not isinstance(self.begun, Mapping):
                raise _type_error("begun", "a dict with the turn as it was given, or None", self.begun)
            nested_texts("begun", self.begun)  # refuses what cannot be walked
        # The check for Mapping alone takes ten times as long for a dict.
        if not isinstance(self.extra, (dict, Mapping)):
            raise _type_error("extra", "a mapping", self.extra)
        for key in self.extra:
            if not isinstance(key, str) or key in FIELDS:
                what = "a field of Message" if isinstance(key, str) else f"a {type(key).__name__}"
                raise invalid("extra", f"expected names that Message does not have as keys; {shown(key)} is {what}")
        if self.extra:
            nested_texts("extra", self.extra)  # refuses what cannot be walked

    @classmethod
    def from_dict(cls, message: Message | Mapping[str, Any]) -> Message:
        """Build from a dict in the usual chat format; unknown keys go into `extra`. Return a `Message` as it is.

        A content that is a list of text parts, as OpenAI's protocol has them, becomes their texts, one per line.
        """
        if isinstance(message, Message):
            return message
        if not isinstance(message, Mapping):
            raise _type_error("message", "a Message or a dict with a role", message)
        known = {key: message[key] for key in FIELDS if key in message}
        if "role" not in known:
            raise InvalidRequestError(f"role is missing; the keys are: {', '.join(map(shown, message))}", field="role")
        if isinstance(known.get("content"), (list, tuple)):
            known["content"] = _joined_parts(known["content"])
        extra = {key: value for key, value in message.items() if key not in FIELDS}
        # A template would fail, or write "None", for what is most likely a misspelt key.
        if "content" not in known and not (known.get("tool_calls") or extra):
            keys = ", ".join(map(shown, message))
            raise invalid("content", f"the message has neither content nor tool_calls; its keys are: {keys}")
        made = cls(**known, extra=extra)
        # Copied once they are known to be of a depth that can be copied.
        if made.tool_calls:
            object.__setattr__(made, "tool_calls", _copy("tool_calls", made.tool_calls))
        if extra:
            object.__setattr__(made, "extra", _copy("extra", extra))
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return `role`, `content` and the other fields that are set: the inverse of `from_dict`.

        The dict shares no data with the message.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls is not None:
            message["tool_calls"] = deepcopy(list(self.tool_calls))
        message |= {name: given for name in ("tool_call_id", "name") if (given := getattr(self, name)) is not None}
        if self.token_ids is not None:
            message["token_ids"] = list(self.token_ids)
        if self.begun is not None:
            message["begun"] = deepcopy(dict(self.begun))
        if self.extra:
            message |= deepcopy(dict(self.extra))
        return message

    def for_template(self) -> dict[str, Any]:
        """Return the dict that a chat template reads, without ids and without None, which templates print.

        Arguments of calls become objects, see `with_object`.
        """
        if self.content is not None and not (self.tool_calls or self.tool_call_id or self.name or self.extra):
            # Fast path: a batch has thousands of messages, and most are like this.
            return {"role": self.role, "content": self.content}
        message = self.to_dict()
        message.pop("token_ids", None)
        message.pop("begun", None)
        message["tool_calls"] = [with_object(call) for call in self.tool_calls] if self.tool_calls else None
        return {key: value for key, value in message.items() if value is not None}


Chat = tuple[Message, ...]


def refuse_misspelt(message: Message, keys: Collection[str]) -> None:
    """Refuse a message that is empty but for a key that a slip makes of a usual one, which is not among the `keys`."""
    if message.content is None and not message.tool_calls:
        for key, usual in itertools.product(message.extra, ("content", "tool_calls")):
            ours, theirs = Counter(key), Counter(usual)
            # The same letters, or one more or less; not another one, as in "context".
            if usual not in keys and ((ours - theirs) | (theirs - ours)).total() < 2:
                what = f"did you mean {usual!r}? If the template reads {key!r}, give {usual!r}: None as well"
                raise invalid(key, what)


def warn_of_roles(chats: Iterable[Chat]) -> None:
    """Warn of roles that are spelt almost like a usual one. One that contains it, such as "user_2", is no slip."""
    for role in sorted({message.role for chat in chats for message in chat}.difference(_ROLES)):
        near = difflib.get_close_matches(role, _ROLES, 1, 0.8)
        if near and near[0] not in role.lower():
            what = f"the template is given the role {shown(role)} as it is; did you mean {near[0]!r}?"
            warnings.warn(what, stacklevel=level_of_caller())


def with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object, if they are none, an empty text, or the JSON text of an object.

    OpenAI's protocol has texts, and clients leave out what is empty.
    """
    made = deepcopy(dict(call))
    holder = made["function"] if isinstance(made.get("function"), dict) else made
    given = holder.get("arguments")
    if given is None and "name" in holder:
        holder["arguments"] = {}
    if isinstance(given, str):
        try:
            found = json.loads(given.strip() or "null")
            # Python reads NaN, which no other program does.
            json.dumps(found, allow_nan=False)
        except (ValueError, RecursionError):
            return made
        if found is None or isinstance(found, dict):
            holder["arguments"] = found or {}
    return made


def _joined_parts(content: Sequence[Any]) -> str:
    texts: list[str] = []
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS
        text = part.get("text") if is_text else part
        if not isinstance(text, str):
            expected = 'expected a text, or a list of parts such as {"type": "text", "text": "…"}'
            raise invalid("content", f"{expected}, got the part {shown(part)}; images are not supported")
        texts.append(text)
    return "\n".join(texts)


def new_call_id() -> str:
    """Return the id of a call that has none: nine letters or digits, as the templates of Mistral demand."""
    return uuid.uuid4().hex[:9]


def short_id(call_id: str) -> str:
    """Return an id of nine letters or digits for a call, the same for the same id."""
    return call_id if re.fullmatch("[A-Za-z0-9]{9}", call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _copy(name: str, value: Any) -> Any:
    try:
        return deepcopy(value)
    except Exception as error:
        raise invalid(name, f"holds what cannot be copied: {described(error)}") from error


def _type_error(name: str, expected: str, value: Any) -> InvalidRequestError:
    return invalid(name, f"expected {expected}, got {type(value).__name__}")
