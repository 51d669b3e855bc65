"""The input of ``corelm generate`` and ``corelm score``: JSONL, read line by line into a `Line` or a `LineError`.

`prompts` and `completions` say what a line of each command may hold.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from corelm.errors import InvalidRequestError
from corelm.spec import Chat, Message
from corelm.validate import DEEPEST, nested_texts
from corelm_cli import strict_json
from corelm_cli.streams import without_bom

Id = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A valid line of any command.

    Attributes:
        line: line number, counted from 1, blank lines included.
        id: the given id, or `line` if the input has none.
        digest: identifies what is asked: 16 hex digits of the sha256 of its keys and values, as JSON.
        asked: the keys and values that `digest` identifies, which ``--copy-input`` copies to the output.
        sample: for a line that is one of several answers with the same id, which one it is.
        metadata: the user's value, copied to the output.
    """

    line: int
    id: Id
    digest: str
    asked: dict[str, Any]
    sample: int | None = None
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


L = TypeVar("L", bound=Line)

#: Makes a line from its number, its id and the JSON object on it. Raises `InvalidRequestError` if the object is wrong.
ReadLine = Callable[[int, Id, dict[str, Any]], L]


def count_lines(file: IO[bytes]) -> int | None:
    """Return the number of lines that are not blank; None for a pipe, which can be read only once."""
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
    except io.UnsupportedOperation:  # a stream in memory
        return None
    start = file.tell()
    count = sum(1 for line in file if line.strip())
    file.seek(start)
    return count


def read_lines(file: IO[bytes], read: ReadLine[L]) -> Iterator[L | LineError]:
    """Yield every line that is not blank, in order."""
    seen: dict[tuple[Id, int | None], int] = {}
    for number, line in enumerate(without_bom(file), 1):
        if not line.strip():
            continue
        parsed = _parse(number, line, read)
        if not isinstance(parsed, LineError):
            first = seen.setdefault((parsed.id, parsed.sample), number)
            if first != number:
                parsed = LineError(number, parsed.id, f"line {first} already has the id {parsed.id!r}")
        yield parsed


def _parse(number: int, line: bytes, read: ReadLine[L]) -> L | LineError:
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
    name = number if row.get("id") is None else row["id"]
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        return LineError(number, None, f"id: expected a string or an integer, got {name!r}")
    try:
        _canonical(row)  # raises if any text in the row cannot be encoded
        return read(number, name, row)
    except InvalidRequestError as error:
        return LineError(number, name, str(error))


# What the commands read in the same way -------------------------------------------------------------------------------


def asked(row: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a `Line` that describe what is asked: `digest` and `asked`, for these keys of the row."""
    given = {key: row[key] for key in keys if key in row}
    return {"digest": hashlib.sha256(_canonical(given)).hexdigest()[:16], "asked": given}


def check_keys(row: dict[str, Any], keys: Sequence[str], ignored: Sequence[str] = ()) -> None:
    """Refuse a row with other keys than these."""
    if unknown := [key for key in row if key not in (*keys, *ignored)]:
        raise InvalidRequestError(f"unknown keys: {', '.join(unknown)}; a line may have {', '.join(keys)}")


def text(row: dict[str, Any], key: str) -> str:
    """Return the text under `key`."""
    if not isinstance(row[key], str):
        raise InvalidRequestError(f"{key}: expected a string, got {type(row[key]).__name__}")
    return str(row[key])


def chat(row: dict[str, Any]) -> Chat | None:
    """Return the conversation under `messages`; None if there is none."""
    if "messages" not in row:
        return None
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages: expected a list of at least one message")
    try:
        return tuple(map(Message.from_dict, messages))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"messages: {error}") from error


def tools(row: dict[str, Any]) -> list[Any] | None:
    """Return the tools of a conversation; None if there are none."""
    if "tools" not in row:
        return None
    if "messages" not in row:
        raise InvalidRequestError("tools: only a chat template reads tools; give `messages` as well")
    if not isinstance(row["tools"], list):
        raise InvalidRequestError(f"tools: expected a list, got {type(row['tools']).__name__}")
    return row["tools"]


def _canonical(value: Any) -> bytes:
    written = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    try:
        return written.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{written[error.start]!r} is a lone surrogate, which cannot be encoded as UTF-8"
        ) from error
