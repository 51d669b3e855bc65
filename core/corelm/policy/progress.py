"""`answer_bar`: a progress bar over the answers of one call. It changes nothing about the call."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from corelm import validate
from corelm.errors import brief, described
from corelm.spec.records import GenerateResult

_log = logging.getLogger(__name__)

#: Seconds between two drawings of the bar.
_REDRAW = 0.1


class AnswerBar:
    """Counts finished answers and their tokens; made by `answer_bar`.

    The engine may call it on any thread, and after the call has ended. Its errors, such as those of a terminal that is
    gone, reach neither the engine nor the caller.

    Args:
        bar: a tqdm bar.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._tokens: dict[int, int] = {}
        self._drawn = time.monotonic()
        self._closed = False
        self._lock = threading.Lock()

    def __call__(self, row: int, tokens: int) -> None:
        """Count the answer of a row. If the call is repeated, the row counts once."""
        with self._lock, _dropping_errors():
            self._tokens[row] = tokens
            now = time.monotonic()
            if now - self._drawn >= _REDRAW and not self._closed:
                self._drawn = now
                self._show(len(self._tokens), sum(self._tokens.values()))
                self._bar.refresh()

    def expect(self, answers: int) -> None:
        """Show how many answers there will be."""
        with self._lock, _dropping_errors():
            self._bar.total = answers
            self._bar.refresh()

    def complete(self, result: GenerateResult) -> None:
        """Count all answers, also those that the engine did not report."""
        with self._lock, _dropping_errors():
            self._show(len(result.finish_reasons), len(result.ids.values))

    def close(self) -> None:
        """Draw the bar for the last time."""
        with self._lock, _dropping_errors():
            self._closed = True
            self._bar.close()

    def _show(self, answers: int, tokens: int) -> None:
        self._bar.n, seconds = answers, self._bar.format_dict["elapsed"]
        if seconds > 0:
            self._bar.set_postfix_str(f"{tokens / seconds:,.0f} tokens/s", refresh=False)


@contextmanager
def answer_bar(progress: bool) -> Iterator[AnswerBar | None]:
    """Yield a bar on stderr, or None if none is wanted or stderr is no terminal.

    Raises:
        InvalidRequestError: tqdm is not installed.
    """
    if not validate.flag("progress", progress) or not _on_a_terminal():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise validate.invalid("progress", "the bar needs tqdm: pip install tqdm") from error

    class Bar(tqdm):
        # tqdm would start a thread that outlives the bar.
        monitor_interval = 0

    bar = None
    with _dropping_errors():
        bar = AnswerBar(Bar(desc="answers", unit="answer", dynamic_ncols=True))
    try:
        yield bar
    finally:
        if bar is not None:
            bar.close()


def _on_a_terminal() -> bool:
    # A program without a console has None here, and a stream that was closed raises.
    with suppress(Exception):
        return bool(sys.stderr.isatty())
    return False


@contextmanager
def _dropping_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _log.debug("the progress bar failed: %s", brief(described(error)))
