"""`answer_bar`: a progress bar over the answers of one call. It changes nothing about the call."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from corelm import validate
from corelm.errors import brief, described, how_to_install
from corelm.spec.records import GenerateResult

_log = logging.getLogger(__name__)

#: Seconds between two drawings of the bar.
_REDRAW = 0.1


class AnswerBar:
    """Counts finished answers and their tokens; made by `answer_bar`, and closed by ``with``.

    The engine may call it on any thread, and after the call has ended. Errors of a terminal that is gone, and
    of wrong reports, reach neither the engine nor the caller.

    Args:
        make: makes the bar of tqdm.
    """

    def __init__(self, make: Any) -> None:
        self._tokens: dict[int, int] = {}
        self._drawn = time.monotonic()
        self._closed = True
        self._lock = threading.Lock()
        with self._drawing():
            self._bar = make(desc="answers", unit="answer", dynamic_ncols=True)
            self._closed = False

    def __call__(self, row: int, tokens: int) -> None:
        """Count the answer of a row. If the call is repeated, the row counts once."""
        with self._drawing():
            self._tokens[row] = tokens
            now = time.monotonic()
            if now - self._drawn >= _REDRAW and not self._closed:
                self._drawn = now
                self._show(len(self._tokens), sum(self._tokens.values()))
                self._bar.refresh()

    def expect(self, answers: int) -> None:
        """Show how many answers there will be."""
        with self._drawing():
            self._bar.total = answers
            self._bar.refresh()

    def complete(self, result: GenerateResult) -> None:
        """Count all answers, also those that the engine did not report."""
        with self._drawing():
            self._show(len(result.finish_reasons), len(result.ids.values))

    def __enter__(self) -> AnswerBar:
        return self

    def __exit__(self, *exc: object) -> None:
        """Draw the bar for the last time."""
        with self._drawing():
            self._closed = True
            self._bar.close()

    def _show(self, answers: int, tokens: int) -> None:
        self._bar.n, seconds = answers, self._bar.format_dict["elapsed"]
        if seconds > 0:
            self._bar.set_postfix_str(f"{tokens / seconds:,.0f} tokens/s", refresh=False)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except Exception as error:
                _log.debug("the progress bar failed: %s", brief(described(error)))


def answer_bar(progress: bool) -> AnswerBar | None:
    """Return a bar on stderr, or None if none is wanted or stderr is no terminal.

    Raises:
        InvalidRequestError: tqdm is not installed.
    """
    if not validate.flag("progress", progress) or not _on_a_terminal():
        return None
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise validate.invalid("progress", f"the bar needs tqdm: {how_to_install('tqdm')}") from error

    class Bar(tqdm):
        # tqdm would start a thread that outlives the bar.
        monitor_interval = 0

    return AnswerBar(Bar)


def _on_a_terminal() -> bool:
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # a program without a console, and a stream that was closed
        return False
