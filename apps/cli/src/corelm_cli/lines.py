"""The input of the commands for files: JSONL, read line by line into a `Line` or a `LineError`."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from corelm.errors import InvalidRequestError
from corelm.spec import Chat, Message
from corelm.validate import DEEPEST, did_you_mean, invalid, nested_texts, token_ids
from corelm_cli import strict_json
from corelm_cli.streams import opened_input, without_bom

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
    asked: dict[str, Any] = field(default_factory=dict)
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


# What a line of each command may hold ---------------------------------------------------------------------------------

#: The keys that hold one completion. `response` is what ``corelm generate`` writes.
ONE = ("completion", "response")
#: Other keys that ``corelm generate --copy-input`` writes, so that its output can be scored and compared.
FROM_ANSWERS = (
    *("line", "prompt_hash", "sample", "finish_reason", "tokens", "token_ids", "log_probs"),
    *("message", "message_error", "engine", "provenance", "settings"),
    *("kept_ids", "kept_log_mass", "top_ids", "top_log_probs", "tail_log_mass"),
)
#: How many lines that are wrong a message names.
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(Line):
    """A line to answer: either `text` or `chat` is given."""

    text: str | None = None
    chat: Chat | None = None
    tools: list[Any] | None = None


def read_prompt(number: int, name: Id, row: dict[str, Any]) -> Prompt:
    """Read a line with `prompt`, or with `messages` and optionally `tools`."""
    always = _always(number, name, row, ("prompt", "messages", "tools"))
    _one_of(row, "prompt", "messages")
    return Prompt(text=_text(row, "prompt"), chat=_chat(row), tools=_tools(row), **always)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToScore(Prompt):
    """A line to score.

    Attributes:
        text: a text to score as a whole.
        prompt: the text that the completions continue.
        chat: a conversation. Its assistant's turns are scored, or, with `completions`, those as its next turn.
        completions: the completions, each scored by itself; empty if the line has none.
        single: whether the line has one completion that is not in a list, or none.
    """

    prompt: str | None = None
    completions: tuple[str, ...] = ()
    single: bool = True


def read_to_score(number: int, name: Id, row: dict[str, Any]) -> ToScore:
    """Read a line with `text`, with `messages`, or with `prompt` or `messages` and completions."""
    asked = ("text", "prompt", "messages", "tools", "completions", *ONE)
    always = _always(number, name, row, asked, FROM_ANSWERS)
    _one_of(row, "text", "prompt", "messages")
    found = [key for key in ("completions", *ONE) if key in row]
    if len(found) > 1:
        raise InvalidRequestError(f"expected one of `completions`, `completion` and `response`, got {', '.join(found)}")
    if "prompt" in row and not found:
        raise InvalidRequestError("prompt: nothing to score; give `completion` or `completions`, or `text` instead")
    if "text" in row and found:
        raise InvalidRequestError(f"{found[0]}: a `text` is scored as a whole; give `prompt` instead of `text`")
    single = found != ["completions"]
    completions: Any = [_text(row, key) for key in found] if single else row["completions"] or None
    if not isinstance(completions, list) or not all(isinstance(each, str) for each in completions):
        raise InvalidRequestError("completions: expected a list of at least one string")
    return ToScore(
        text=_text(row, "text"),
        prompt=_text(row, "prompt"),
        chat=_chat(row),
        tools=_tools(row),
        completions=tuple(completions),
        single=single,
        **always,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared(Line):
    """A line to compare.

    Attributes:
        prompt: a text, a list of messages, or ids.
        completion: a text or ids; None if the line has none.
    """

    prompt: Any
    completion: str | tuple[int, ...] | None = None


def read_compared(number: int, name: Id, row: dict[str, Any]) -> Compared:
    """Read a line with one of `prompt`, `messages` and `ids`, and perhaps `completion` or `response`.

    The `token_ids` that ``corelm generate --return-tokens`` writes come before the text of a response: the text may
    have other ids.
    """
    always = _always(number, name, row, ("prompt", "messages", "ids", *ONE), FROM_ANSWERS)
    kind = _one_of(row, "prompt", "messages", "ids")
    found = [key for key in ONE if key in row]
    if len(found) > 1:
        raise InvalidRequestError("expected `completion` or `response`, got both")
    _chat(row)  # raises if `messages` is not a conversation
    prompt = row["messages"] if kind == "messages" else _ids(row, kind) if kind == "ids" else _text(row, kind)
    completion = _ids(row, "token_ids") if "token_ids" in row else _text(row, found[0]) if found else None
    return Compared(prompt=prompt, completion=completion, **always)


def read_all(path: Path | None, most: int | None) -> tuple[list[Any], list[Any] | None]:
    """Return the prompts of a file, or of the standard input for None, and their completions; None if it has none.

    Raises:
        InvalidRequestError: a line is wrong, some lines have completions and others have not, or there are none.
        OSError: the file cannot be read.
    """
    with opened_input(path) as (file, _):
        found = list(islice(read_lines(file, read_compared), most))
    wrong = [each for each in found if isinstance(each, LineError)]
    if wrong:
        named = "; ".join(f"line {each.line}: {each.error}" for each in wrong[:_NAMED])
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise invalid("--input", f"{named}{more}")
    read = [each for each in found if isinstance(each, Compared)]
    if not read:
        raise invalid("--input", "there is no line; leave the flag out to compare with the built-in prompts")
    without = [each for each in read if each.completion is None]
    if without and len(without) < len(read):
        raise invalid(
            "--input", f"line {without[0].line} has no completion, and others have one; give all lines one, or none"
        )
    return [each.prompt for each in read], None if without else [each.completion for each in read]


def _always(
    number: int, name: Id, row: dict[str, Any], asked: Sequence[str], ignored: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the fields that every line has. Refuse a row with other keys than those asked for and those ignored."""
    keys = ("id", *asked, "metadata")
    if unknown := [key for key in row if key not in (*keys, *ignored)]:
        if "log_prob" in unknown and "prompt_hash" in row:
            raise InvalidRequestError("this line is output of `corelm score`; give the file that was scored")
        meant = next(filter(None, (did_you_mean(key, keys) for key in unknown)), "")
        raise InvalidRequestError(f"unknown keys: {', '.join(unknown)}; a line may have {', '.join(keys)}{meant}")
    sample = row.get("sample")
    if sample is not None and (isinstance(sample, bool) or not isinstance(sample, int)):
        raise InvalidRequestError(f"sample: expected an integer, got {sample!r}")
    given = {key: row[key] for key in asked if key in row}
    digest = hashlib.sha256(_canonical(given)).hexdigest()[:16]
    always = {"line": number, "id": name, "digest": digest, "asked": given}
    return {**always, "sample": sample, "metadata": row.get("metadata")}


def _one_of(row: dict[str, Any], *keys: str) -> str:
    given = [key for key in keys if key in row]
    if not given and "response" in row and "prompt_hash" in row:
        raise InvalidRequestError("this answer has no prompt; make the answers with `corelm generate --copy-input`")
    if len(given) != 1:
        names = f"{', '.join(f'`{key}`' for key in keys[:-1])} and `{keys[-1]}`"
        raise InvalidRequestError(f"expected one of {names}, got {' and '.join(given) or 'none of them'}")
    return given[0]


def _text(row: dict[str, Any], key: str) -> str | None:
    """Return the text under `key`; None if there is none."""
    if key in row and not isinstance(row[key], str):
        raise InvalidRequestError(f"{key}: expected a string, got {type(row[key]).__name__}")
    return row.get(key)


def _ids(row: dict[str, Any], key: str) -> tuple[int, ...]:
    if not isinstance(row[key], list):
        raise InvalidRequestError(f"{key}: expected a list of token ids, got {type(row[key]).__name__}")
    return token_ids(key, row[key])


def _chat(row: dict[str, Any]) -> Chat | None:
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


def _tools(row: dict[str, Any]) -> list[Any] | None:
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
