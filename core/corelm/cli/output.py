"""The output of ``corelm generate``: a file that answers are appended to, and a file for the lines that failed.

A file is emptied or removed only if this command wrote every line in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corelm.cli.line_file import LineFile, OutputError, locked
from corelm.cli.prompts import Id, LineError, Prompt

#: How every answer and every failed line starts: these texts, with a JSON value after each but the last.
ANSWER = (b'{"id": ', b', "line": ', b', "prompt_hash": "')
FAILED = (b'{"line": ', b', "id": ', b', "error": "')


class AnswersFile:
    """The open output file and the answers in it. Create one with `open`.

    Attributes:
        done: (id, sample) of every answer in the file.
    """

    def __init__(self, file: LineFile, settings: Mapping[str, Any]) -> None:
        self.done: set[tuple[Id, int]] = set()
        self._digests: dict[Id, str] = {}
        self._file, self._settings = file, settings
        self._read()

    @classmethod
    @contextmanager
    def open(cls, path: Path, settings: Mapping[str, Any]) -> Iterator[AnswersFile]:
        """Lock the file for this run and read it. A new file that gets no answer is removed at the end.

        Raises:
            OutputError: a line is not an answer, or was made with other `settings`, or another run has the file open.
                The file is unchanged.
        """
        with locked(path, keep_empty=path.exists()) as file:
            yield cls(file, settings)

    def unanswered(
        self, lines: Iterable[Prompt | LineError], samples: Iterable[int]
    ) -> tuple[list[Prompt], list[LineError]]:
        """Return the prompts that still need answers, and the line errors.

        A prompt whose id already has answers to a different prompt becomes a line error.
        """
        prompts, errors = [], []
        for line in lines:
            if isinstance(line, LineError):
                errors.append(line)
            elif self._digests.get(line.id, line.digest) != line.digest:
                conflict = f"{self._file.path} has answers to another prompt under the id {line.id!r}"
                errors.append(LineError(line.line, line.id, f"{conflict}; use another id or another --output"))
            elif any((line.id, sample) not in self.done for sample in samples):
                prompts.append(line)
        return prompts, errors

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the rows that are not in the file yet. They survive a crash of this process."""
        new = {key: row for row in rows if (key := (row["id"], row.get("sample", 0))) not in self.done}
        self._file.append(_line({**row, "settings": self._settings}) for row in new.values())
        self.done.update(new)

    def _read(self) -> None:
        for number, line in enumerate(self._file.read(ANSWER), 1):
            self._add(number, line)

    def _add(self, number: int, line: bytes) -> None:
        where, instead = f"{self._file.path}, line {number},", "use another --output"
        try:
            row = json.loads(line)
            key, made, digest = (row["id"], row.get("sample", 0)), dict(row["settings"]), row["prompt_hash"]
            self.done.add(key)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise OutputError(f"{where} is not an answer; {instead}") from error
        for name in sorted({*made, *self._settings}):
            was, now = made.get(name), self._settings.get(name)
            if was != now:
                raise OutputError(f"{where} was made with {name} {was!r}, but {name} is now {now!r}; {instead}")
        self._digests[row["id"]] = digest


class ErrorsFile:
    """The open errors file, next to the output. Create one with `open`.

    It lists the lines that failed in the last run, and is removed if no line failed. After a run that did not finish,
    it also lists the lines that failed in earlier runs and were not tried again.

    Attributes:
        path: where the file is.
        failed: numbers of the lines that failed in this run.
        suspects: ids of the lines that the engine was answering when it failed in an earlier run, in the order in which
            that happened.
    """

    def __init__(self, file: LineFile) -> None:
        self.path = file.path
        self.failed: set[int] = set()
        self.suspects: list[Id] = []
        self._file = file
        self._earlier: dict[tuple[int, Id | None], bytes] = {}
        self._written: list[bytes] = []
        self._read()
        self._at_start = len(self._earlier)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[ErrorsFile]:
        """Lock the file for this run and read it.

        Raises:
            OutputError: the file does not consist of lines that failed, or another run has it open. It is
                unchanged.
        """
        with locked(path, keep_empty=False) as file:
            errors = cls(file)
            try:
                yield errors
            finally:
                errors.drop_stale()

    def add(self, error: LineError) -> None:
        """Append a line that failed."""
        row = {"line": error.line, "id": error.id, "error": error.error}
        if error.engine_failed:
            row["engine_failed"] = True
        self.tried(error)
        self.failed.add(error.line)
        self._written.append(_line(row))
        self._file.append(self._written[-1:])

    def tried(self, line: Prompt | LineError) -> None:
        """Drop what an earlier run noted about a line."""
        self._earlier.pop((line.line, line.id), None)

    def finished(self) -> None:
        """Drop everything that earlier runs noted: this run tried every line."""
        self._earlier.clear()

    def drop_stale(self) -> None:
        """Remove from the file what was dropped."""
        if len(self._earlier) < self._at_start:
            self._file.clear()
            self._file.append([*self._earlier.values(), *self._written])

    def _read(self) -> None:
        for number, line in enumerate(self._file.read(FAILED), 1):
            try:
                row = json.loads(line)
                suspect, key = row.pop("engine_failed", False), (row["line"], row["id"])
                if set(row) != {"line", "id", "error"}:
                    raise ValueError("other keys")
                self._earlier[key] = line.rstrip(b"\n") + b"\n"
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise OutputError(
                    f"{self.path}, line {number}, is not a line that failed, but failed lines are written to this "
                    "file; move it, or use another --output"
                ) from error
            if suspect and row["id"] is not None:
                self.suspects.append(row["id"])


def errors_path(output: Path) -> Path:
    """Return ``answers.errors.jsonl`` for ``answers.jsonl``; any other name gets ``.errors.jsonl`` appended."""
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl")


def check_paths(source: Path, target: Path) -> None:
    """Check that both output files are regular files or new, and that neither is the input.

    Raises:
        OutputError: one of them is not a regular file, or is the input, or both are one file.
    """
    errors = errors_path(target)
    _check_path(source, target, "the output")
    _check_path(source, errors, "the output's errors file")
    if target.exists() and errors.exists() and target.samefile(errors):
        raise OutputError(f"{errors}, the output's errors file, is the output itself; use another --output")


def _check_path(source: Path, path: Path, what: str) -> None:
    if path.exists() and path.samefile(source):
        raise OutputError(f"{path} is both {what} and the input; use another --output")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}, {what}, is not a regular file; use another --output")


def _line(row: Mapping[str, Any]) -> bytes:
    # A lone surrogate, as in a path that is not UTF-8, cannot be encoded; backslashreplace writes it as JSON does.
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")
