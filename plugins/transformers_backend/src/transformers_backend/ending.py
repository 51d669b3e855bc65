"""`AnswerEnding`: which answers the newest tokens ended, and why."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from corelm.spec import SamplingParams
from corelm.support import StopStrings


class AnswerEnding:
    """Says after every step which answers it ended.

    An answer ends with a stop id, with the token that completes a stop string, or at its length limit. A stop string
    counts once the answer has ``min_new_tokens``; the sampler does not sample stop ids before that.

    Args:
        sampling: the stop strings and `min_new_tokens`.
        stop_ids: ids that end an answer.
        limits: int64[rows], the longest answer of each row.
        tokenizer: decodes the ids in which stop strings are searched.
    """

    def __init__(self, sampling: SamplingParams, stop_ids: frozenset[int], limits: Tensor, tokenizer: Any) -> None:
        self._stop_ids = stop_ids
        self._limits: list[int] = limits.tolist()
        self._length = 0
        stop_strings = StopStrings.of(sampling, tokenizer)
        self._watches = [stop_strings.watch() for _ in self._limits] if sampling.stop else None

    def __call__(self, ids: Tensor) -> dict[int, bool]:
        """Return the rows that the newest ids, int64[rows], ended: False for a length limit, True for any other end."""
        self._length += 1
        ended = {row: False for row, limit in enumerate(self._limits) if limit <= self._length}
        if self._stop_ids or self._watches:
            for row, token in enumerate(ids.tolist()):
                # A watch has to see every token, so it is asked first.
                completed = self._watches is not None and self._watches[row].completed_by(token)
                if completed or token in self._stop_ids:
                    ended[row] = True
        return ended

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64[n]."""
        kept = rows.tolist()
        self._limits = [self._limits[row] for row in kept]
        if self._watches is not None:
            self._watches = [self._watches[row] for row in kept]
