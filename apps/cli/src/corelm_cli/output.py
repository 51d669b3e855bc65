"""The output of ``corelm generate`` and ``corelm score``: answers, and the lines that failed.

Both go into files that are appended to, or answers go to a stream. A file is emptied or removed only if this command
wrote every line in it. A run adds to answers only if they have its settings and answer lines of its input.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corelm_cli.line_file import INSTEAD, LineFile, OutputError, locked
from corelm_cli.lines import Id, L, Line, LineError
from corelm_cli.settings import IDENTITIES, SettingsFile
from corelm_cli.streams import Stream

#: How every answer and every failed line starts: these texts, with a JSON value after each but the last.
ANSWER = (b'{"id": ', b', "line": ', b', "prompt_hash": "')
FAILED = (b'{"line": ', b', "id": ', b', "error": "')


class Answers:
    """Answers that go to a stream. Each says how the engine ran and what its log-probs are of; none is read back."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._engine: Mapping[str, str] = {}
        #: The digest of what was asked, for each id and sample number.
        self._digests: dict[Id, dict[int, str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._digests.values()))

    def unanswered(self, lines: Iterable[L | LineError], samples: int) -> tuple[list[L], list[LineError]]:
        """Return the lines that still need one of `samples` answers, and the line errors.

        Raises:
            OutputError: the id of a line has answers to something else.
        """
        waiting, errors = [], []
        for line in lines:
            if isinstance(line, LineError):
                errors.append(line)
                continue
            if not self._made_for(line) >= {*(range(samples) if line.sample is None else [line.sample])}:
                waiting.append(line)
        return waiting, errors

    def check_input(self, lines: Iterable[Line | LineError]) -> None:
        """Check that all answers are to these lines.

        Raises:
            OutputError: some are to other lines.
        """
        answered = {(name, number) for name, made in self._digests.items() for number in made}
        for line in lines:
            if not isinstance(line, LineError):
                answered -= {(line.id, number) for number in self._made_for(line)}
        if answered:
            name = next(iter(answered))[0]
            raise OutputError(f"{self} has answers to other lines than those of the input, such as {name!r}; {INSTEAD}")

    def _made_for(self, line: Line) -> set[int]:
        """Return the numbers of the samples that exist of a line."""
        made = self._digests.get(line.id, {})
        numbers = {*made} if line.sample is None else {*made} & {line.sample}
        if any(made[number] != line.digest for number in numbers):
            raise OutputError(f"{self} has answers to another prompt under the id {line.id!r}; {INSTEAD}")
        return numbers

    def write(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write the rows that were not written yet, and return them."""
        new = [row for row in rows if row.get("sample", 0) not in self._digests.get(row["id"], {})]
        if new:
            self._append(new)
        for row in new:
            self._note(row)
        return new

    def start(self, engine: Mapping[str, str]) -> None:
        """Drop old answers, if that was asked for: the engine is open, and new ones follow.

        Args:
            engine: what makes the new ones.
        """
        self._engine = engine

    def _note(self, row: Mapping[str, Any]) -> None:
        self._digests.setdefault(row["id"], {})[row.get("sample", 0)] = row["prompt_hash"]

    def _append(self, rows: list[dict[str, Any]]) -> None:
        assert self._stream is not None
        self._stream.write(b"".join(_line({**row, "engine": self._engine}) for row in rows))


class AnswersFile(Answers):
    """The open output file and the answers in it. Create one with `open`."""

    def __init__(
        self, file: LineFile, settings: SettingsFile, run: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        super().__init__(None)
        self._file, self._settings, self._run, self._overwrite = file, settings, run, overwrite
        #: What earlier runs have recorded about the model, by the names in `IDENTITIES`.
        self._model: dict[str, str] = {}
        self._read()

    @classmethod
    @contextmanager
    def open(
        cls,
        path: Path,
        settings: Mapping[str, Any],
        files: Mapping[str, str],
        run: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> Iterator[AnswersFile]:
        """Lock the file for this run and read it. A new file that gets no answer is removed at the end.

        Args:
            files: the fingerprints of the files of the model and of the adapter, see `files_of`.
            run: what is saved about the run if it is the first.
            overwrite: drop the answers that are there, once `start` is called.

        Raises:
            OutputError: a line is not an answer, or was made with other `settings`, or another run has the file open,
                or another program made the file for the settings. All files are unchanged.
        """
        existed = path.exists()
        with locked(path, keep_empty=existed) as file:
            answers = cls(file, SettingsFile(settings_path(path), settings), run, overwrite=overwrite)
            answers.check_model(files)
            yield answers

    def check_model(self, engine: Mapping[str, str]) -> None:
        """Check that the answers are of this model, as far as `engine` tells: see `IDENTITIES`.

        Raises:
            OutputError: they are of another one.
        """
        for name, what in IDENTITIES.items():
            was, now = self._model.get(name), engine.get(name)
            if was and now and was != now:
                raise OutputError(f"{self}: {what} changed since the answers were made, from {was} to {now}; {INSTEAD}")

    def start(self, engine: Mapping[str, str]) -> None:
        """See `Answers`."""
        self.check_model(engine)
        super().start(engine)
        if self._overwrite:
            self._file.clear()

    def __str__(self) -> str:
        return str(self._file.path)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        settings = self._settings
        if not len(self):
            # Before the first answer, so that no answer is ever without its settings.
            settings.save(self._engine, rows[0].get("provenance"), self._run)
        assert settings.saved is not None
        said = {name: settings.saved.get(name) for name in ("engine", "provenance")}
        rows = [{**row, "engine": self._engine, "settings": settings.fingerprint} for row in rows]
        self._file.append(_line({k: v for k, v in row.items() if k not in said or v != said[k]}) for row in rows)

    def _read(self) -> None:
        for number, line in enumerate(self._file.read(ANSWER), 1):
            where = f"{self}, line {number},"
            try:
                row = json.loads(line)
                made = row["settings"]
                if not self._overwrite:
                    self._note(row)
                    self._model |= row.get("engine") or (self._settings.saved or {}).get("engine") or {}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise OutputError(f"{where} is not an answer; use another --output") from error
            if not (self._overwrite or self._settings.holds_for(made)):
                self._settings.refuse_answers_of(made, where)


class Errors:
    """The lines that failed. For an output that is a file, those in the open errors file next to it: see `open`.

    The file lists the lines that failed in the last run, and is removed if no line failed. After a run that did not
    finish, it also lists the lines that failed in earlier runs and were not tried again.

    Attributes:
        failed: numbers of the lines that failed in this run.
        suspects: ids of the lines that the engine was answering when it failed in an earlier run, in the order in which
            that happened.
    """

    def __init__(self, file: LineFile | None = None) -> None:
        self.failed: set[int] = set()
        self.suspects: list[Id] = []
        self._file = file
        self._earlier: dict[tuple[int, Id | None], bytes] = {}
        self._written: list[bytes] = []
        if file is not None:
            self._read(file)
        self._at_start = len(self._earlier)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Errors]:
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
                errors.rewrite(file)

    def add(self, error: LineError) -> None:
        """Note a line that failed, and append it to the file."""
        self.failed.add(error.line)
        self.tried(error)
        if self._file is not None:
            row = {"line": error.line, "id": error.id, "error": error.error}
            self._written.append(_line(row | ({"engine_failed": True} if error.engine_failed else {})))
            self._file.append(self._written[-1:])

    def tried(self, line: Line | LineError) -> None:
        """Drop what an earlier run noted about a line."""
        self._earlier.pop((line.line, line.id), None)

    def finished(self) -> None:
        """Drop everything that earlier runs noted: this run tried every line, or is the first of a new output."""
        self._earlier.clear()
        self.suspects.clear()

    def rewrite(self, file: LineFile) -> None:
        """Remove from the file what was dropped."""
        if len(self._earlier) < self._at_start:
            file.clear()
            file.append([*self._earlier.values(), *self._written])

    def _read(self, file: LineFile) -> None:
        for number, line in enumerate(file.read(FAILED), 1):
            try:
                row = json.loads(line)
                suspect, key = row.pop("engine_failed", False), (row["line"], row["id"])
                if set(row) != {"line", "id", "error"}:
                    raise ValueError("other keys")
                self._earlier[key] = line.rstrip(b"\n") + b"\n"
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise OutputError(
                    f"{file.path}, line {number}, is not a line that failed, but failed lines are written to this "
                    "file; move it, or use another --output"
                ) from error
            if suspect and row["id"] is not None:
                self.suspects.append(row["id"])


def errors_path(output: Path) -> Path:
    """Return ``answers.errors.jsonl`` for ``answers.jsonl``; any other name gets ``.errors.jsonl`` appended."""
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl")


def count_rows(path: Path) -> int:
    """Return the number of answers in a file."""
    try:
        with path.open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def settings_path(output: Path) -> Path:
    """Return ``answers.settings.json`` for ``answers.jsonl``; any other name gets ``.settings.json`` appended."""
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.settings.json")


def check_paths(source: os.stat_result | None, target: Path) -> None:
    """Check that the files are different.

    All of them must be regular files or new, and none may be the input.

    Args:
        source: the open input file; None if it is not a file.

    Raises:
        OutputError: a file is not regular, or is the input, or two are one file.
    """
    others = {errors_path(target): "the output's errors file", settings_path(target): "the output's settings file"}
    for path, what in {target: "the output", **others}.items():
        if source is not None and path.exists() and os.path.samestat(path.stat(), source):
            raise OutputError(f"{path} is both {what} and the input; use another --output")
        if path.exists() and not path.is_file():
            raise OutputError(f"{path}, {what}, is not a regular file; use another --output")
    for path, what in others.items():
        if target.exists() and path.exists() and target.samefile(path):
            raise OutputError(f"{path}, {what}, is the output itself; use another --output")


def _line(row: Mapping[str, Any]) -> bytes:
    # A lone surrogate, as in a path that is not UTF-8, cannot be encoded; backslashreplace writes it as JSON does.
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")
