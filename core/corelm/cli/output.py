"""The output of ``corelm generate``: a file that answers are appended to, and a file for the lines that failed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from corelm.cli.prompts import Id, LineError, Prompt
from corelm.errors import CoreLMError

try:
    import fcntl
except ImportError:  # Windows has no fcntl
    fcntl = None  # type: ignore[assignment]


class OutputError(CoreLMError, ValueError):
    """The output file must not be written: another job or another program made it, or another run is writing it."""


class AnswersFile:
    """The open output file and the answers in it. Create one with `open`.

    Attributes:
        done: (id, sample) of every answer in the file.
    """

    def __init__(self, file: IO[bytes], path: Path, settings: Mapping[str, Any]) -> None:
        self.done: set[tuple[Id, int]] = set()
        self._digests: dict[Id, str] = {}
        self._file, self._path, self._settings = file, path, settings
        self._read()

    @classmethod
    @contextmanager
    def open(cls, path: Path, settings: Mapping[str, Any]) -> Iterator[AnswersFile]:
        """Lock the file for this run and read it. A new file that gets no answer is removed at the end.

        A last line that was cut off is removed. A last line that only lacks its newline gets one.

        Raises:
            OutputError: a line is not an answer, or was made with other `settings`, or another run has the file open.
                The file is unchanged.
        """
        existed = path.exists()
        with path.open("a+b") as file:
            _lock(file, path)
            try:
                yield cls(file, path, settings)
            finally:
                if not existed and not os.fstat(file.fileno()).st_size:
                    with suppress(OSError):
                        path.unlink()

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
                conflict = f"{self._path} has answers to another prompt under the id {line.id!r}"
                errors.append(LineError(line.line, line.id, f"{conflict}; use another id or another --output"))
            elif any((line.id, sample) not in self.done for sample in samples):
                prompts.append(line)
        return prompts, errors

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the rows that are not in the file yet, and flush them so that they survive a crash of this process."""
        for row in rows:
            key = (row["id"], row.get("sample", 0))
            if key not in self.done:
                self._file.write(_line({**row, "settings": self._settings}))
                self.done.add(key)
        self._file.flush()

    def _read(self) -> None:
        self._file.seek(0)
        end, line = 0, b"\n"
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and self._is_torn(line):
                self._file.truncate(end)
                return
            self._add(number, line)
            end += len(line)
        if not line.endswith(b"\n"):
            self._file.write(b"\n")

    def _is_torn(self, tail: bytes) -> bool:
        """Return whether the last line is an answer that was cut off, rather than data from another program."""
        if not self.done and not tail.startswith(b'{"id": '):
            return False
        try:
            json.loads(tail)
        except (ValueError, RecursionError):
            return True
        return False

    def _add(self, number: int, line: bytes) -> None:
        where, instead = f"{self._path}, line {number},", "use another --output"
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
    """The errors file next to the output. It covers the last run only, and does not exist if no line failed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.unlink(missing_ok=True)
        self.count = 0

    def write(self, error: LineError) -> None:
        """Append a line that failed."""
        with self.path.open("ab") as file:
            file.write(_line({"line": error.line, "id": error.id, "error": error.error}))
        self.count += 1


def errors_path(output: Path) -> Path:
    """Return ``answers.errors.jsonl`` for ``answers.jsonl``; any other name gets ``.errors.jsonl`` appended."""
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl")


def check_paths(source: Path, target: Path) -> None:
    """Check that both output files are regular files or new, and that neither is the input.

    Raises:
        OutputError: one of them is not a regular file, or is the input.
    """
    _check_path(source, target, "the output")
    _check_path(source, errors_path(target), "the output's errors file")


def _check_path(source: Path, path: Path, what: str) -> None:
    if path.exists() and path.samefile(source):
        raise OutputError(f"{path} is both {what} and the input; use another --output")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}, {what}, is not a regular file; use another --output")


def _lock(file: IO[bytes], path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another run is writing {path}; wait until it ends, or use another --output") from None
    except OSError:
        # Some network file systems do not support locks.
        pass


def _line(row: Mapping[str, Any]) -> bytes:
    # A lone surrogate, as in a path that is not UTF-8, cannot be encoded; backslashreplace writes it as JSON does.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
