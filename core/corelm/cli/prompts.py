"""The input of ``corelm generate``: JSONL, read line by line. Each line becomes a `Prompt` or a `LineError`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from corelm.cli import strict_json
from corelm.errors import InvalidRequestError
from corelm.spec.message import Chat, Message
from corelm.validate import DEEPEST, nested_texts

Id = str | int

KEYS = ("id", "prompt", "messages", "tools", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A valid line: a text or a conversation.

    Attributes:
        line: line number, counted from 1, blank lines included.
        id: the given id, or `line` if the input has none.
        digest: identifies the prompt: 16 hex digits of the sha256 of `prompt`, or `messages` and `tools`, as JSON.
        text: the prompt, if it is a text.
        chat: the prompt, if it is a conversation.
        tools: tools for the chat template.
        metadata: the user's value, copied to the answer.
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
    """A line that failed.

    Attributes:
        line: line number, counted from 1, blank lines included.
        id: the line's id; None if it could not be read.
        error: why the line failed.
        engine_failed: the engine failed while it answered this line, perhaps because of another line.
    """

    line: int
    id: Id | None
    error: str
    engine_failed: bool = False


def count_lines(file: IO[bytes]) -> int | None:
    """Return the number of lines that are not blank; None for a pipe, which can be read only once."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return None
    start = file.tell()
    count = sum(1 for line in file if line.strip())
    file.seek(start)
    return count


def read_prompts(file: IO[bytes]) -> Iterator[Prompt | LineError]:
    """Yield every line that is not blank, in order."""
    seen: dict[Id, int] = {}
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        parsed = _parse(number, line)
        if isinstance(parsed, Prompt) and seen.setdefault(parsed.id, number) != number:
            parsed = LineError(number, parsed.id, f"line {seen[parsed.id]} already has the id {parsed.id!r}")
        yield parsed


def _parse(number: int, line: bytes) -> Prompt | LineError:
    try:
        row = strict_json.loads(line)
        nested_texts("line", row, most=math.inf)  # refuses a line that is nested too deep
    except RecursionError:
        return LineError(number, None, f"objects and lists are nested more than {DEEPEST} levels deep")
    except InvalidRequestError as error:
        return LineError(number, None, str(error))
    except ValueError as error:
        return LineError(number, None, f"not valid JSON: {error}")
    if not isinstance(row, dict):
        return LineError(number, None, f"expected an object, got {type(row).__name__}")
    name = row.get("id", number)
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        return LineError(number, None, f"id: expected a string or an integer, got {name!r}")
    try:
        return _prompt(number, name, row)
    except InvalidRequestError as error:
        return LineError(number, name, str(error))


def _prompt(number: int, name: Id, row: dict[str, Any]) -> Prompt:
    _canonical(row)  # raises if any text in the row cannot be encoded
    asked = _canonical({key: row[key] for key in ("prompt", "messages", "tools") if key in row})
    digest = hashlib.sha256(asked).hexdigest()[:16]
    if unknown := [key for key in row if key not in KEYS]:
        raise InvalidRequestError(f"unknown keys: {', '.join(unknown)}; a line may have {', '.join(KEYS)}")
    if ("prompt" in row) == ("messages" in row):
        raise InvalidRequestError(f"expected either `prompt` or `messages`, got {', '.join(row) or 'neither'}")
    metadata = row.get("metadata")
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise InvalidRequestError(f"prompt: expected a string, got {type(row['prompt']).__name__}")
        if "tools" in row:
            raise InvalidRequestError("tools: only a chat template reads tools; give `messages` instead of `prompt`")
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
        return tuple(map(Message.from_dict, messages))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"messages: {error}") from error


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{text[error.start]!r} is a lone surrogate, which cannot be encoded as UTF-8"
        ) from error
