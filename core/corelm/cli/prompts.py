"""The input of ``corelm generate``: JSONL, read a line at a time. A line is a prompt, or what is wrong with it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from corelm.errors import InvalidRequestError
from corelm.spec.message import Chat, Message

Id = str | int

KEYS = ("id", "prompt", "messages", "tools", "metadata")
#: Objects and lists inside each other. What is nested deeper would exhaust the stack of whoever walks it later.
DEEPEST = 100
#: No vocabulary is larger; an id from here on may not even fit the types that hold ids.
ANY_VOCABULARY = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A good line: a text, or a conversation with perhaps `tools` for its template.

    Attributes:
        line: counts from 1, blank lines included.
        id: `line` where none is given.
        digest: says what was asked: 16 hex digits of the sha256 of `prompt`, or `messages` and `tools`, as JSON.
        metadata: the user's own, for the answer's row.
    """

    line: int
    id: Id
    digest: str
    text: str | None = None
    chat: Chat | None = None
    tools: list[Any] | None = None
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that cannot be answered, and why."""

    line: int
    id: Id | None
    error: str


def count_lines(file: IO[bytes]) -> int | None:
    """How many lines of the file are not blank; None for a pipe, whose lines can be read only once."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return None
    start = file.tell()
    count = sum(1 for line in file if line.strip())
    file.seek(start)
    return count


def read_prompts(file: IO[bytes]) -> Iterator[Prompt | LineError]:
    """Every line that is not blank, in order."""
    seen: dict[Id, int] = {}
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        parsed = _parse(number, line)
        if isinstance(parsed, Prompt) and seen.setdefault(parsed.id, number) != number:
            parsed = LineError(number, parsed.id, f"the id {parsed.id!r} is line {seen[parsed.id]}'s already")
        yield parsed


def _parse(number: int, line: bytes) -> Prompt | LineError:
    try:
        row = json.loads(line)
        too_deep = _depth(row) > DEEPEST
    except ValueError as error:
        return LineError(number, None, f"no JSON: {error}")
    except RecursionError:
        too_deep = True
    if too_deep:
        return LineError(number, None, f"objects and lists are nested more than {DEEPEST} deep")
    if not isinstance(row, dict):
        return LineError(number, None, f"expected an object, got {type(row).__name__}")
    name = row.get("id", number)
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        return LineError(number, None, f"id: expected a text or a whole number, got {name!r}")
    try:
        return _prompt(number, name, row)
    except InvalidRequestError as error:
        return LineError(number, name, str(error))


def _prompt(number: int, name: Id, row: dict[str, Any]) -> Prompt:
    _canonical(row)  # every text in it can be written
    asked = _canonical({key: row[key] for key in ("prompt", "messages", "tools") if key in row})
    digest = hashlib.sha256(asked).hexdigest()[:16]
    if unknown := [key for key in row if key not in KEYS]:
        raise InvalidRequestError(f"unknown: {', '.join(unknown)}; a line may have {', '.join(KEYS)}")
    if ("prompt" in row) == ("messages" in row):
        raise InvalidRequestError(f"expected either `prompt` or `messages`, got: {', '.join(row) or 'nothing'}")
    metadata = row.get("metadata")
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise InvalidRequestError(f"prompt: expected a text, got {type(row['prompt']).__name__}")
        if "tools" in row:
            raise InvalidRequestError("tools: a chat template reads them, so they go with `messages`, not `prompt`")
        return Prompt(line=number, id=name, digest=digest, text=row["prompt"], metadata=metadata)
    tools = row.get("tools")
    if "tools" in row and not isinstance(tools, list):
        raise InvalidRequestError(f"tools: expected a list, got {type(tools).__name__}")
    chat = _chat(row["messages"])
    return Prompt(line=number, id=name, digest=digest, chat=chat, tools=tools, metadata=metadata)


def _chat(messages: Any) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages: expected a list of at least one message")
    try:
        chat = tuple(map(Message.from_dict, messages))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"messages: {error}") from error
    largest = max((token for message in chat for token in message.token_ids or ()), default=0)
    if largest >= ANY_VOCABULARY:
        raise InvalidRequestError(f"messages: token_ids has {largest}, which no vocabulary holds")
    return chat


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{text[error.start]!r} is half of a surrogate pair, which is no text") from error


def _depth(value: Any) -> int:
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
