"""`Bar`: how far a command is, on the standard error of a person who waits.

This module must not import torch, for the sake of ``corelm --help``.
"""

from __future__ import annotations

import sys
from threading import Timer
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from corelm_cli.streams import Messages, is_terminal

#: Seconds of work after which its progress is shown.
LONG = 3.0


class Bar:
    """A bar with the time left and a rate. In a pipe or a log, and before `LONG` seconds, nothing is shown.

    Args:
        counts: whether to show how many are done, and from that the time left.
        redirects: whether what others print meanwhile is shown above the bar.
    """

    def __init__(
        self,
        doing: str,
        *,
        quiet: bool,
        counts: bool = True,
        console: Console | None = None,
        redirects: bool = True,
    ) -> None:
        console = console or Console(file=cast(IO[str], Messages()), highlight=False)
        counted = [MofNCompleteColumn(), TimeRemainingColumn()] if counts else []
        self._bar = Progress(
            *(TextColumn("{task.description}"), BarColumn(), *counted),
            TextColumn("{task.fields[rate]}"),
            console=console,
            transient=not counts,
            redirect_stdout=redirects,
            redirect_stderr=redirects,
            disable=quiet or not is_terminal(sys.stderr) or console.is_dumb_terminal,
        )
        self._task = self._bar.add_task(doing, total=None, rate="")
        self._timer = Timer(LONG, self._bar.start)
        self._timer.daemon = True

    def show(self, doing: str | None = None, rate: str = "", **numbers: Any) -> None:
        """Update the bar.

        Args:
            doing: what is done now; None for the same as before.
            rate: such as "40 tokens/s".
            numbers: `total`, `advance` and the others that `rich.progress.Progress.update` takes.
        """
        said: dict[str, Any] = {} if doing is None else {"description": escape(doing)}
        self._bar.update(self._task, rate=escape(rate), **said, **numbers)

    def __enter__(self) -> Bar:
        self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        self._timer.join()
        self._bar.stop()
