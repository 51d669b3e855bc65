"""``corelm generate``: answer the prompts of a file in batches, and append the answers to another file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from corelm.cli.batch import Answerer
from corelm.cli.output import AnswersFile, ErrorsFile, check_paths, errors_path
from corelm.cli.prompts import Id, LineError, Prompt, count_lines, read_prompts
from corelm.cli.settings import recorded_settings
from corelm.errors import BackendTimeoutError, EngineError, printable
from corelm.opening.by_name import get_backend
from corelm.spec.sampling import SamplingParams

#: How many characters of the error of a line are shown. The errors file has all of them.
SHOWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Answer the prompts of `source` and append the answers to `target`.

    With a seed, an answer depends only on the seed, the line number and the sample number: not on the batch size, and
    not on what was answered before. That is why a job passes one seed per answer to the backend; a policy would number
    the rows of each batch.
    """

    source: Path
    target: Path
    backend: str
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 16
    log_probs: Literal["none", "raw", "processed"] = "none"
    return_tokens: bool = False
    retry: int | None = None
    timeout: float | None = None

    def run(self, console: Console) -> int:
        """Run the job and return the number of lines that failed. If it raises, the answers so far are in `target`."""
        sampling = SamplingParams.make(self.sampling)
        settings = recorded_settings(
            sampling,
            self.options,
            backend=self.backend,
            model=self.model,
            log_probs=self.log_probs,
            return_tokens=self.return_tokens,
        )
        check_paths(self.source, self.target)
        # Open the files first, so that errors in them are reported before a model loads.
        with (
            self.source.open("rb") as source,
            AnswersFile.open(self.target, settings) as answers,
            ErrorsFile.open(errors_path(self.target)) as errors,
            get_backend(self.backend, self.model, retry=self.retry, timeout=self.timeout, **self.options) as engine,
            _progress(console) as progress,
        ):
            before = len(answers.done)
            answerer = Answerer(
                engine=engine, sampling=sampling, log_probs=self.log_probs, return_tokens=self.return_tokens
            )
            run = _Run(answerer, answers, errors, console)
            task = progress.add_task("answering", total=count_lines(source))
            for lines in run.batches(read_prompts(source), self.batch_size):
                run.answer(lines)
                progress.advance(task, len(lines))
            errors.finished()
        summary = f"{len(answers.done) - before} answers written, {before} already present"
        if errors.failed:
            summary += f", {len(errors.failed)} lines failed (see {errors.path})"
        _tell(console, summary)
        return len(errors.failed)


@dataclass(frozen=True, slots=True)
class _Run:
    """A job whose files and engine are open."""

    answerer: Answerer
    answers: AnswersFile
    errors: ErrorsFile
    console: Console

    def batches(self, lines: Iterator[Prompt | LineError], size: int) -> Iterator[list[Prompt | LineError]]:
        """Yield the lines in batches of `size`; then, one at a time, those that the engine failed at in earlier runs.

        One of these lines may be the reason why the engine failed, and must not hold up the others.
        """
        last: dict[Id | None, int] = {name: number for number, name in enumerate(self.errors.suspects)}
        suspects: list[Prompt | LineError] = []
        while batch := list(islice(lines, size)):
            suspects += [line for line in batch if line.id in last]
            if others := [line for line in batch if line.id not in last]:
                yield others
        for line in sorted(suspects, key=lambda line: last[line.id]):
            yield [line]

    def answer(self, lines: list[Prompt | LineError]) -> None:
        """Write the answers to the lines, and report the lines that failed."""
        sampling = self.answerer.sampling
        prompts, failed = self.answers.unanswered(lines, range(sampling.num_samples or 1))
        asked = {prompt.line: prompt for prompt in prompts}
        # The others have answers from an earlier run.
        for line in lines:
            if line.line not in {*asked, *(error.line for error in failed)}:
                self.errors.tried(line)
        try:
            for rows, more in self.answerer.answer(prompts) if prompts else [([], [])]:
                self.answers.write(rows)
                self._report(failed + more)
                failed = []
                # Not before: after Ctrl-C, lines without an outcome keep what an earlier run noted about them.
                for number in {row["line"] for row in rows}:
                    self.errors.tried(asked[number])
        except (EngineError, BackendTimeoutError) as error:
            self._report(failed)
            self._note_suspects(error)
            raise

    def _report(self, failed: list[LineError]) -> None:
        for error in sorted(failed, key=lambda error: error.line):
            _tell(self.console, f"line {error.line}: {_shortened(error.error)}")
            self.errors.add(error)

    def _note_suspects(self, error: Exception) -> None:
        suspects = self.answerer.attempted
        what = f"the engine failed while it was answering this line: {error}"
        for line in suspects:
            self.errors.add(LineError(line.line, line.id, what, engine_failed=True))
        numbers = ", ".join(str(line.line) for line in suspects)
        _tell(
            self.console,
            f"The engine failed while it was answering the following lines; the next run tries them last: {numbers}",
        )


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"


def _tell(console: Console, line: str) -> None:
    console.print(printable(line), markup=False, emoji=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
