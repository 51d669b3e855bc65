"""`answer_bar`: a progress bar over the answers of one call."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from corelm import validate
from corelm.spec.records import TokenChunk

#: Seconds between two drawings of the bar.
_REDRAW = 0.1


class AnswerBar:
    """Counts finished answers and tokens; made by `answer_bar`.

    Args:
        bar: a tqdm bar.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._tokens = 0
        self._drawn = time.monotonic()

    def expect(self, answers: int) -> None:
        """Note how many answers there will be."""
        self._bar.total = answers
        self._bar.refresh()

    def __call__(self, chunk: TokenChunk) -> None:
        self._tokens += len(chunk.ids)
        self._bar.n += chunk.finish_reason is not None
        now, seconds = time.monotonic(), self._bar.format_dict["elapsed"]
        if now - self._drawn >= _REDRAW and seconds > 0:
            self._drawn = now
            self._bar.set_postfix_str(f"{self._tokens / seconds:,.0f} tokens/s", refresh=True)


@contextmanager
def answer_bar(progress: bool) -> Iterator[AnswerBar | None]:
    """Yield a bar on stderr, or None if none is wanted or stderr is no terminal.

    Raises:
        InvalidRequestError: tqdm is not installed.
    """
    if not validate.flag("progress", progress) or not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise validate.invalid("progress", "the bar needs tqdm: pip install tqdm") from error

    class Bar(tqdm):
        # tqdm would start a thread that outlives the bar.
        monitor_interval = 0

    with Bar(desc="answers", unit="answer", dynamic_ncols=True) as bar:
        yield AnswerBar(bar)
