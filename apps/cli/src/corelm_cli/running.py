"""`run`: runs the job of a command to its end, says what it did, and exits.

This module must not import torch, for the sake of ``corelm --help``.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

import typer
from rich.console import Console

from corelm.errors import CoreLMError
from corelm_cli.exits import ENGINE_FAILED, INTERRUPTED, SOME_FAILED, exit_code, typed_exits
from corelm_cli.streams import Messages, Stream, standard_output, tell
from corelm_cli.summary import Summary
from corelm_cli.wording import as_flags

if TYPE_CHECKING:
    from corelm_cli.job import Job


def run(job: Job[Any], as_json: bool) -> NoReturn:
    """Run a job, say what it did, and exit."""
    from corelm_cli.output import errors_path

    summary = Summary(
        command=job.settings["command"],
        output=job.target,
        errors=None if job.target is None else errors_path(job.target),
        settings=job.settings,
    )
    with typed_exits(), ExitStack() as stack:
        # What engines print must not get among the answers, or into the JSON.
        stdout = stack.enter_context(standard_output()) if job.target is None or as_json else None
        code = _to_its_end(job, summary, stdout)
        begun = summary.seconds and summary.status == "interrupted"
        if not job.quiet and (summary.written or summary.failed or begun or summary.status == "finished"):
            for line in summary.lines():
                tell(line)
        exists = job.target is not None and summary.written + summary.present > 0
        if exists and summary.status in ("failed", "interrupted"):
            again = "Run the same command again" + (" with the same input" if job.source is None else "")
            tell(f"{again} to continue with the remaining lines.")
        if as_json:
            told = json.dumps(summary.to_dict(), ensure_ascii=False) + "\n"
            if job.target is None or stdout is None:
                print(told, end="", file=Messages(), flush=True)
            else:
                stdout.write(told.encode(errors="backslashreplace"))
    raise typer.Exit(code)


def _to_its_end(job: Job[Any], summary: Summary, stdout: Stream | None) -> int:
    """Run a job and return the exit code. How it ended is in the summary, and an error was printed."""
    from corelm_cli.output import count_rows

    try:
        job.run(Console(file=cast(IO[str], Messages()), highlight=False), summary, stdout)
    except KeyboardInterrupt:
        if job.target is not None and summary.status == "running":
            # The interrupt may have come after answers were written and before they were counted.
            summary.written = count_rows(job.target) - summary.present
        summary.status = "interrupted"
        tell("interrupted")
        return INTERRUPTED
    except (CoreLMError, OSError) as error:
        code = exit_code(error)
        if summary.status == "running" or code == ENGINE_FAILED:
            summary.status = "failed"
        summary.error = as_flags(str(error))
        tell(f"error: {as_flags(str(error))}")
        return code
    summary.status = "finished"
    return SOME_FAILED if summary.failed else 0
