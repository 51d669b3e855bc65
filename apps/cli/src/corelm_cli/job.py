"""`Job`: read lines, let a worker serve them in batches, write what it returns, say what was done, and exit.

Every command for files is one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NoReturn

import torch
import typer

from corelm import Backend
from corelm.errors import BackendTimeoutError, CoreLMError, EngineError, printable
from corelm_cli.batch import Worker
from corelm_cli.engine import EngineChoice
from corelm_cli.exits import ENGINE_FAILED, INTERRUPTED, SOME_FAILED, exit_code, typed_exits
from corelm_cli.lines import Id, L, LineError, ReadLine, count_lines, read_lines
from corelm_cli.output import Answers, AnswersFile, Errors, check_paths, count_rows, errors_path
from corelm_cli.progress import Bar
from corelm_cli.settings import files_of, recorded_engine
from corelm_cli.streams import Messages, Stream, opened_input, standard_output, tell
from corelm_cli.wording import as_flags
from corelm_interop.timing import Timing

#: How many characters of the error of a line are shown. The errors file has all of them.
SHOWN = 1000


@dataclass(kw_only=True)
class Summary:
    """What a run did so far.

    Attributes:
        whole: whether the input is one text, and not lines.
        output: the file that is written; None for the standard output.
        errors: the file that lists the lines that failed, if there is one.
        settings: the settings of the answers.
        engine: what makes the answers, see `recorded_engine`; empty until it is open.
        status: `refused` until the engine is open; then `running`; in the end `finished`, `interrupted` or `failed`.
        finish_reasons: number of written answers by finish reason.
        tokens: number of sampled or scored tokens in the written answers.
        seconds: time spent on the lines: without opening the engine, and without waiting for input.
        timing: has measured the calls of the engine; None if that was not asked for.
    """

    command: str
    whole: bool = False
    output: Path | None = None
    errors: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, str] = field(default_factory=dict)
    status: str = "refused"
    error: str | None = None
    written: int = 0
    present: int = 0
    failed: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0
    timing: Timing | None = None

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count the rows that were written."""
        for row in rows:
            self.written += 1
            self.tokens += row["tokens"] if isinstance(row["tokens"], int) else sum(row["tokens"])
            if "finish_reason" in row:
                self.finish_reasons[row["finish_reason"]] += 1

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    def lines(self) -> list[str]:
        """Return the summary as a person reads it."""
        scores = self.command == "score"
        done = (
            f"{counted(self.written, 'text' if self.whole else 'line')} scored"
            if scores
            else f"{counted(self.written, 'answer')} written"
        )
        said = f"{done}, {self.present} already present"
        if self.failed:
            where = "the messages above" if self.errors is None else self.errors
            said += f", {counted(self.failed, 'line')} failed (see {where})"
        told = [said]
        if self.finish_reasons:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self.finish_reasons.most_common())
            told.append(f"finish reasons: {reasons}")
        if self.tokens_per_second is not None and self.tokens:
            tokens = f"{counted(self.tokens, 'token')} {'scored' if scores else 'sampled'}"
            told.append(f"{tokens} in {self.seconds:.1f} s, {self.tokens_per_second:,.0f} tokens/s")
        if how := self.engine.get("model"):
            told.append(f"model: {how}")
        if self.timing is not None:
            told += repr(self.timing.summary()).splitlines()
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the summary in JSON types."""
        return {
            "command": self.command,
            "status": self.status,
            "error": self.error,
            "written": self.written,
            "present": self.present,
            "failed": self.failed,
            "finish_reasons": dict(self.finish_reasons),
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": None if self.tokens_per_second is None else round(self.tokens_per_second, 1),
            "output": None if self.output is None else str(self.output),
            "errors_file": None if self.errors is None or not self.failed else str(self.errors),
            "settings": self.settings,
            "engine": self.engine,
            **({} if self.timing is None else {"timing": self.timing.summary().to_dict()}),
        }


def counted(number: int, name: str) -> str:
    """Return a number with the name of what it counts: "1 line", "1,200 lines"."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[L]):
    """Serve the lines of `source`, and append the answers to `target`.

    Attributes:
        source: the input file; None for the standard input.
        target: the output file; None for the standard output.
        settings: the settings that all answers in `target` have.
        defaults: the values of settings that are not in `settings` because they are at their default.
        samples: number of answers to a line.
        batch_size: number of lines to serve at a time.
        whole: whether `source` is one text, and not lines.
        as_json: whether to print the summary as JSON.
    """

    source: Path | None
    target: Path | None
    engine: EngineChoice
    settings: Mapping[str, Any]
    read: ReadLine[L]
    worker: Callable[[Backend], Worker[L]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 1
    batch_size: int = 16
    whole: bool = False
    overwrite: bool = False
    quiet: bool = False
    timed: bool = False
    as_json: bool = False

    def run(self) -> NoReturn:
        """Run the job, say what it did, and exit."""
        errors = None if self.target is None else errors_path(self.target)
        command = self.settings["command"]
        summary = Summary(command=command, whole=self.whole, output=self.target, errors=errors, settings=self.settings)
        with typed_exits(), ExitStack() as stack:
            # What engines print must not get among the answers, or into the JSON.
            stdout = stack.enter_context(standard_output()) if self.target is None or self.as_json else None
            code = self._to_its_end(summary, stdout)
            self._tell(summary)
            if self.as_json:
                told = json.dumps(summary.to_dict(), ensure_ascii=False) + "\n"
                if self.target is None or stdout is None:
                    print(told, end="", file=Messages(), flush=True)
                else:
                    stdout.write(told.encode(errors="backslashreplace"))
        raise typer.Exit(code)

    def _run(self) -> dict[str, Any]:
        """Return what the settings file records about this run. A later run may differ in all of it."""
        run: dict[str, Any] = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "batch_size": self.batch_size,
            "defaults": dict(self.defaults),
        }
        if self.source is not None and self.source.is_file():
            with self.source.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            run["input"] = {"path": str(self.source), "sha256": digest}
        return run

    def _tell(self, summary: Summary) -> None:
        """Say what was done, and how to go on."""
        begun = summary.seconds and summary.status == "interrupted"
        if not self.quiet and (summary.written or summary.failed or begun or summary.status == "finished"):
            for line in summary.lines():
                tell(line)
        exists = self.target is not None and summary.written + summary.present > 0
        if exists and summary.status in ("failed", "interrupted"):
            again = "Run the same command again" + (" with the same input" if self.source is None else "")
            tell(f"{again} to continue with the remaining lines.")

    def _to_its_end(self, summary: Summary, stdout: Stream | None) -> int:
        """Serve all lines and return the exit code. How it ended is in the summary, and an error was printed."""
        try:
            self._serve(summary, stdout)
        except KeyboardInterrupt:
            if self.target is not None and summary.status == "running":
                # The interrupt may have come after answers were written and before they were counted.
                summary.written = count_rows(self.target) - summary.present
            summary.status = "interrupted"
            tell("interrupted")
            return INTERRUPTED
        except (CoreLMError, OSError) as error:
            code = exit_code(error)
            if summary.status == "running" or code == ENGINE_FAILED:
                summary.status = "failed"
            summary.error = as_flags(str(error))
            tell(f"error: {summary.error}")
            return code
        summary.status = "finished"
        return SOME_FAILED if summary.failed else 0

    def _serve(self, summary: Summary, stdout: Stream | None) -> None:
        """Serve all lines and count the results in `summary`. Answers made before an error are written all the same."""
        with ExitStack() as stack:
            # Open the files first, so that errors in them are reported before a model loads.
            source, known = stack.enter_context(opened_input(self.source, whole=self.whole))
            files = files_of(model_files=self.engine.model, adapter_files=self.engine.adapter_folder)
            answers: Answers
            if self.target is not None:
                check_paths(known, self.target)
                opened = AnswersFile.open(self.target, self.settings, files, self._run(), overwrite=self.overwrite)
                answers = stack.enter_context(opened)
                errors = stack.enter_context(Errors.open(errors_path(self.target)))
            else:
                answers, errors = Answers(stdout), Errors()
            total = count_lines(source)
            if (present := len(answers)) and total is not None:
                start = source.tell()
                answers.check_input(read_lines(source, self.read))
                source.seek(start)
            summary.present = present
            summary.timing = Timing() if self.timed else None
            engine = stack.enter_context(self.engine.open([summary.timing] if summary.timing else []))
            summary.engine = {**recorded_engine(engine), **files}
            answers.start(summary.engine)
            summary.status = "running"
            if self.overwrite:
                errors.finished()
            run = _Run(self.worker(engine), answers, errors, self.samples, summary)
            doing = "scoring" if summary.command == "score" else "answering"
            bar = stack.enter_context(Bar(doing, quiet=self.quiet or self.target is None))
            bar.show(total=total)
            for lines in run.batches(read_lines(source, self.read), self.batch_size):
                run.serve(lines)
                bar.show(rate=f"{summary.tokens_per_second or 0:,.0f} tokens/s", advance=len(lines))
            errors.finished()


@dataclass(frozen=True, slots=True)
class _Run(Generic[L]):
    """A job whose files and engine are open."""

    worker: Worker[L]
    answers: Answers
    errors: Errors
    samples: int
    summary: Summary

    def batches(self, lines: Iterator[L | LineError], size: int) -> Iterator[list[L | LineError]]:
        """Yield the lines in batches of `size`; then, one at a time, those that the engine failed at in earlier runs.

        One of these lines may be the reason why the engine failed, and must not hold up the others.
        """
        last: dict[Id | None, int] = {name: number for number, name in enumerate(self.errors.suspects)}
        suspects: list[L | LineError] = []
        while batch := list(islice(lines, size)):
            suspects += [line for line in batch if line.id in last]
            if others := [line for line in batch if line.id not in last]:
                yield others
        for line in sorted(suspects, key=lambda line: last[line.id]):
            yield [line]

    def serve(self, lines: list[L | LineError]) -> None:
        """Write the answers to the lines, and report the lines that failed."""
        waiting, failed = self.answers.unanswered(lines, self.samples)
        asked = {line.line: line for line in waiting}
        # The others have answers from an earlier run.
        for line in lines:
            if line.line not in {*asked, *(error.line for error in failed)}:
                self.errors.tried(line)
        start = time.perf_counter()
        try:
            for rows, more in self.worker.serve(waiting) if waiting else [([], [])]:
                self.summary.add(self.answers.write(rows))
                self._report(failed + more)
                failed = []
                # Not before: after Ctrl-C, lines without an outcome keep what an earlier run noted about them.
                for number in {row["line"] for row in rows}:
                    self.errors.tried(asked[number])
        except (EngineError, BackendTimeoutError) as error:
            self._report(failed)
            self._note_suspects(error)
            raise
        finally:
            if waiting:
                self.summary.seconds += time.perf_counter() - start

    def _report(self, failed: list[LineError]) -> None:
        for error in sorted(failed, key=lambda error: error.line):
            error = replace(error, error=as_flags(error.error))
            # One line each: a traceback in the error of one line must not hide those of the others.
            tell(printable(f"line {error.line}: {_shortened(error.error)}"))
            self.errors.add(error)
        self.summary.failed = len(self.errors.failed)

    def _note_suspects(self, error: Exception) -> None:
        suspects = self.worker.attempted
        what = f"the engine failed while it was answering this line: {error}"
        for line in suspects:
            self.errors.add(LineError(line.line, line.id, what, engine_failed=True))
        self.summary.failed = len(self.errors.failed)
        numbers = ", ".join(str(line.line) for line in suspects)
        tell(f"The engine failed while it was answering the following lines; the next run tries them last: {numbers}")


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"
