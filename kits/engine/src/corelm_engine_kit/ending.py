"""`answer_limits`, `prompts_and_limits`: how long answers may get. `AnswerEnding`: which of them ended with a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from corelm.errors import InvalidRequestError
from corelm.spec import GenerateRequest, Ragged, SamplingParams, StopStrings


class AnswerEnding:
    """Says after every step which answers it ended.

    An answer ends with a stop id, with the token that completes a stop string, or at its length limit. A stop string
    counts once the answer has ``min_new_tokens``; the sampler does not sample stop ids before that.

    Args:
        sampling: the stop strings and `min_new_tokens`.
        stop_ids: ids that end an answer.
        limits: int64[rows], the longest answer of each row.
        tokenizer: decodes the ids in which stop strings are searched.
        prompts: the ids before each answer, which its text continues.

    Attributes:
        reads_ids: whether it has to know the ids; otherwise answers end at their limits only.
        length: how many tokens the answers have.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        limits: Tensor,
        tokenizer: Any,
        prompts: Ragged,
    ) -> None:
        self._stop_ids = stop_ids
        self._limits: list[int] = limits.tolist()
        self.length = 0
        stop_strings = StopStrings.of(sampling, tokenizer)
        self._watches = [stop_strings.after(ids).watch() for ids in prompts.tolist()] if sampling.stop else None
        self.reads_ids = bool(stop_ids) or self._watches is not None

    def __call__(self, ids: Sequence[int] | None) -> dict[int, bool]:
        """Return the rows that the newest ids, one a row, ended: False for a length limit, True for any other end.

        Args:
            ids: may be None if `reads_ids` is False.
        """
        self.length += 1
        ended = {row: False for row, limit in enumerate(self._limits) if limit <= self.length}
        if self.reads_ids:
            assert ids is not None
            for row, token in enumerate(ids):
                # A watch has to see every token, so it is asked first.
                completed = self._watches is not None and self._watches[row].completed_by(token)
                if completed or token in self._stop_ids:
                    ended[row] = True
        return ended

    def of(self, rows: Tensor) -> AnswerEnding:
        """Return the same for these rows only, int64[n] on the CPU. This one may go on with others."""
        other = copy(self)
        other.keep(rows)
        return other

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64[n] on the CPU."""
        kept = rows.tolist()
        self._limits = [self._limits[row] for row in kept]
        if self._watches is not None:
            self._watches = [self._watches[row] for row in kept]


def answer_limits(request: GenerateRequest, max_context: int | None) -> Tensor:
    """Return int64[rows]: the longest answer each prompt may get.

    Raises:
        InvalidRequestError: `max_new_tokens` is None and the model states no context to fill.
    """
    lengths, limit = request.prompts.lengths, request.sampling.max_new_tokens
    if limit is not None:
        return torch.full_like(lengths, limit)
    if max_context is None:
        raise InvalidRequestError(
            "max_new_tokens=None fills the model's context, but this model states none; give a number",
            field="max_new_tokens",
        )
    return max_context - lengths


def prompts_and_limits(
    request: GenerateRequest, max_context: int | None
) -> Iterator[tuple[list[int], int, int | None]]:
    """Yield of each row its prompt, the longest answer that it may get, and its seed; None without seeds.

    Raises:
        InvalidRequestError: that of `answer_limits`.
    """
    seeds = [None] * len(request.prompts) if request.seeds is None else request.seeds.tolist()
    yield from zip(request.prompts.tolist(), answer_limits(request, max_context).tolist(), seeds, strict=True)
