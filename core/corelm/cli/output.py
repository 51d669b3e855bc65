"""The output of ``corelm generate``: answers are appended and found again; what failed goes into a file beside them."""

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
except ImportError:  # there is none on Windows
    fcntl = None  # type: ignore[assignment]


class OutputError(CoreLMError, ValueError):
    """The output cannot be written without harm: it is not this job's own, or another run is writing it."""


class AnswersFile:
    """The output file, open, with all that is in it; made by `open`.

    Attributes:
        done: (id, sample) of every answer that is there.
    """

    def __init__(self, file: IO[bytes], path: Path, settings: Mapping[str, Any]) -> None:
        self.done: set[tuple[Id, int]] = set()
        self._digests: dict[Id, str] = {}
        self._file, self._path, self._settings = file, path, settings
        self._read()

    @classmethod
    @contextmanager
    def open(cls, path: Path, settings: Mapping[str, Any]) -> Iterator[AnswersFile]:
        """Lock the file for this run, and read it. One that is new and gets no answer is removed again.

        A last line that was cut off is removed; one that only lacks its newline gets it.

        Raises:
            OutputError: a line that is no answer, or one that was made with other `settings`; another run that has the
                file open. It is as it was.
        """
        there = path.exists()
        with path.open("a+b") as file:
            _lock(file, path)
            try:
                yield cls(file, path, settings)
            finally:
                if not there and not os.fstat(file.fileno()).st_size:
                    with suppress(OSError):
                        path.unlink()

    def missing(
        self, lines: Iterable[Prompt | LineError], samples: Iterable[int]
    ) -> tuple[list[Prompt], list[LineError]]:
        """The prompts that lack an answer, and the lines at fault: an id that has answers to another prompt is one."""
        prompts, faults = [], []
        for line in lines:
            if isinstance(line, LineError):
                faults.append(line)
            elif self._digests.get(line.id, line.digest) != line.digest:
                what = f"{self._path} has answers to another prompt under the id {line.id!r}"
                faults.append(
                    LineError(line.line, line.id, f"{what}; give this one an id of its own, or another --output")
                )
            elif any((line.id, sample) not in self.done for sample in samples):
                prompts.append(line)
        return prompts, faults

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append those that are not there yet, and hand them to the system, so that they outlive this process."""
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
        """Whether it is an answer that was cut off, and not what somebody else wrote."""
        if not self.done and not tail.startswith(b'{"id": '):
            return False
        try:
            json.loads(tail)
        except (ValueError, RecursionError):
            return True
        return False

    def _add(self, number: int, line: bytes) -> None:
        where, instead = f"{self._path}, line {number},", "give another --output"
        try:
            row = json.loads(line)
            key, made, digest = (row["id"], row.get("sample", 0)), dict(row["settings"]), row["prompt_hash"]
            self.done.add(key)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise OutputError(f"{where} is not an answer; {instead}") from error
        for name in sorted({*made, *self._settings}):
            was, now = made.get(name), self._settings.get(name)
            if was != now:
                raise OutputError(f"{where} was made with {name} {was!r}, and now it is {now!r}; {instead}")
        self._digests[row["id"]] = digest


class ErrorsFile:
    """The errors file beside the output. It tells of the last run only, and is not there if all went well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.unlink(missing_ok=True)
        self.count = 0

    def write(self, fault: LineError) -> None:
        with self.path.open("ab") as file:
            file.write(_line({"line": fault.line, "id": fault.id, "error": fault.error}))
        self.count += 1


def errors_path(output: Path) -> Path:
    """``answers.jsonl`` → ``answers.errors.jsonl``; every other name gets ``.errors.jsonl`` at its end."""
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl")


def check_paths(source: Path, target: Path) -> None:
    """Only regular files are written to, and never the input.

    Raises:
        OutputError: the output or its errors file is something else, or is the input.
    """
    _check_path(source, target, "the output")
    _check_path(source, errors_path(target), "the output's errors file")


def _check_path(source: Path, path: Path, what: str) -> None:
    if path.exists() and path.samefile(source):
        raise OutputError(f"{path} is {what} and the input; give another --output")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}, {what}, is not a regular file; give another --output")


def _lock(file: IO[bytes], path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another run is writing {path}; wait for its end, or give another --output") from None
    except OSError:
        # Some network file systems have no locks.
        pass


def _line(row: Mapping[str, Any]) -> bytes:
    # Half of a surrogate pair, as in a path that is no UTF-8, has no bytes; backslashreplace writes it as JSON does.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
