"""The files of ``corelm generate``: prompts are read line by line, answers are appended and found again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from corelm.errors import CoreLMError, InvalidRequestError
from corelm.history import Chat, Message

Id = str | int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A good line of the input: a text or a conversation. `line` counts from 1; without an `id` it is the id too."""

    line: int
    id: Id
    text: str | None
    chat: Chat | None


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that cannot be answered, and why."""

    line: int
    id: Id | None
    error: str


def count_lines(path: Path) -> int:
    """How many lines of the file are not blank."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def read_prompts(path: Path) -> Iterator[Prompt | Fault]:
    """Every line that is not blank, in order: as a prompt, or as what is wrong with it."""
    seen: dict[Id, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            parsed = _parse(number, line)
            if isinstance(parsed, Prompt) and seen.setdefault(parsed.id, number) != number:
                parsed = Fault(number, parsed.id, f"the id {parsed.id!r} is line {seen[parsed.id]}'s already")
            yield parsed


def _parse(number: int, line: bytes) -> Prompt | Fault:
    try:
        row = json.loads(line)
    except ValueError as error:
        return Fault(number, None, f"no JSON: {error}")
    if not isinstance(row, dict):
        return Fault(number, None, f"expected an object, got {type(row).__name__}")
    name = row.get("id", number)
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        return Fault(number, None, f"id: expected a text or a whole number, got {name!r}")
    if ("prompt" in row) == ("messages" in row):
        return Fault(number, name, f"expected either `prompt` or `messages`, got: {', '.join(row) or 'nothing'}")
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            return Fault(number, name, f"prompt: expected a text, got {type(row['prompt']).__name__}")
        return Prompt(number, name, row["prompt"], None)
    if not isinstance(row["messages"], list) or not row["messages"]:
        return Fault(number, name, "messages: expected a list of at least one message")
    try:
        return Prompt(number, name, None, tuple(map(Message.from_dict, row["messages"])))
    except InvalidRequestError as error:
        return Fault(number, name, f"messages: {error}")


class OutputError(CoreLMError, ValueError):
    """The output file holds something else than the answers of this job."""


class Answers:
    """The output file: read when made, and within the ``with`` block open for appending.

    A last line that was cut off is removed; one that only lacks its newline gets it.

    Attributes:
        done: (id, sample) of every answer that is there.

    Raises:
        OutputError: a line is not an answer, or is one that was made with other `settings`.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.done: set[tuple[Id, int]] = set()
        _mend(path)
        if path.exists():
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    self.done.add(_answer(path, number, line, settings))
        self._path = path

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append those that are not there yet, and hand them to the system, so that they outlive this process."""
        for row in rows:
            key = (row["id"], row.get("sample", 0))
            if key not in self.done:
                self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
                self.done.add(key)
        self._file.flush()

    def __enter__(self) -> Answers:
        self._file: IO[str] = self._path.open("a", encoding="utf-8", newline="\n")
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def _mend(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        torn = content[content.rfind(b"\n") + 1 :]
        if not torn:
            return
        try:
            json.loads(torn)
        except ValueError:
            file.truncate(len(content) - len(torn))
        else:
            file.write(b"\n")


def _answer(path: Path, number: int, line: bytes, settings: Mapping[str, Any]) -> tuple[Id, int]:
    try:
        row = json.loads(line)
        key, made = (row["id"], row.get("sample", 0)), dict(row["settings"])
        hash(key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OutputError(f"{path}, line {number}, is not an answer; give another --output") from error
    for name in sorted({*made, *settings}):
        if made.get(name) != settings.get(name):
            was, now = made.get(name), settings.get(name)
            raise OutputError(
                f"{path}, line {number}, was made with {name} {was!r}, and now it is {now!r}; give another --output"
            )
    return key


class Faults:
    """The errors file beside the output. It tells of the last run only, and is not there if all went well."""

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(f"{output.stem}.errors.jsonl")
        self.path.unlink(missing_ok=True)
        self.count = 0

    def write(self, fault: Fault) -> None:
        row = {"line": fault.line, "id": fault.id, "error": fault.error}
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.count += 1
