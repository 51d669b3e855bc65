"""`BatchDecoding`: the steps of decoding that answer the prompts of one batch.

The rows of a batch grow together, one token a step, and a row leaves when it ends. If the rows grow wider than may be
read at a time, because answers became longer than expected or other calls came, half of them wait. They go on when the
others have ended: their prompts and the answers so far are read again, and their streams of random numbers go on where
they were. So do all rows of a batch after a step that was not made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from corelm.spec import Ragged
from corelm_engine_kit.answers import AnswerGroup, Answers
from corelm_engine_kit.loop import Call, NotDone
from corelm_engine_kit.masses import log_softmax_at
from transformers_backend.continuation import GrowingRows, Share
from transformers_backend.in_flight import CallUpdates
from transformers_backend.memory import DecodingLimits
from transformers_backend.trials import with_others


class BatchDecoding:
    """Answers the prompts of one batch.

    Args:
        answers, call, updates: of the request that it is part of.
        start: puts rows of ids into the model.
        limits: returns how many tokens may be decoded at a time, given the length of the longest row in the model.
        others: returns how many tokens of other calls are in the model.
        keep_raw: whether to keep the model's own log-probs.

    Attributes:
        raw: of each step float32 ``[n, 2]``: the model's own log-probs of the ids that `trials.with_others` makes of
            those sampled, whatever log-probs are asked for.
    """

    def __init__(
        self,
        answers: Answers,
        call: Call,
        updates: CallUpdates,
        start: Callable[[Ragged], GrowingRows],
        limits: Callable[[int], DecodingLimits],
        others: Callable[[Share | None], int],
        *,
        keep_raw: bool,
    ) -> None:
        self.raw: list[Tensor] = []
        self._answers, self._call, self._updates = answers, call, updates
        self._start, self._limits, self._others = start, limits, others
        self._keep_raw = keep_raw
        # Whether its rows share no forward pass with those of other calls, because that has failed.
        self._alone = False
        self._waiting: list[AnswerGroup] = []

    def run(self, group: AnswerGroup, prompts: Ragged, limits: DecodingLimits) -> Generator[Share, None, None]:
        """Answer the prompts. It yields the rows that are to be appended their tokens.

        Args:
            group: the answers to come.
            prompts: what they answer.
            limits: how many tokens may be decoded at a time, known before the first prompt is read.
        """
        yield from self._run(group, prompts, limits)
        while self._waiting:
            yield from self._go_on(self._waiting.pop())

    def _go_on(self, group: AnswerGroup) -> Generator[Share, None, None]:
        """Read the rows of a group that has waited, and let them grow."""
        group = group.of(group.wanted())
        if not len(group.rows):
            return
        rows = self._answers.request.prompts.to("cpu").join(self._answers.ids()).select(group.rows)
        limits = self._limits(int(rows.lengths.max()))
        fit = self._fitting(limits, None, int(rows.lengths.max()) + 1)
        if fit < len(rows):
            self._waiting.append(group.of(torch.arange(fit, len(rows))))
            group, rows = group.of(torch.arange(fit)), rows.select(torch.arange(fit))
        yield from self._run(group, rows, limits)

    def _run(self, group: AnswerGroup, rows: Ragged, limits: DecodingLimits) -> Generator[Share, None, None]:
        """Read the rows of a group, and let them grow until all have ended or wait."""
        self._updates.came_in()
        distinct, answers = _distinct(rows)
        growing = self._start(distinct)
        # From here on a row is an answer: at first one for every prompt, later those that have not ended.
        if len(distinct) < len(rows):
            growing.expand(answers)
        share = Share(growing, limits.tokens, alone=self._alone)
        # It may become one with the rows of other calls.
        del growing
        try:
            yield from self._grow(group, share, limits)
        finally:
            share.leave()

    def _grow(self, group: AnswerGroup, share: Share, limits: DecodingLimits) -> Generator[Share, None, None]:
        while True:
            self._call.deadline.check()
            logits = share.logits
            self._updates.sampled(group.rows, group.length)
            drawn, keep = group.sample(logits)
            if self._keep_raw:
                self.raw.append(log_softmax_at(logits, with_others(drawn.ids, logits.shape[-1])))
            if not len(keep):
                return
            fit = self._fitting(limits, share, share.growing.columns + 1)
            if fit < len(keep):
                # Half of them, so that the others may grow to twice their length before some wait again.
                fit = max(1, min(fit, len(keep) // 2))
                self._waiting.append(group.of(keep[fit:]))
                keep = keep[:fit]
            share.tokens = drawn.ids
            if len(keep) < len(group.rows):
                share.tokens = drawn.ids[keep.to(drawn.ids.device)]
                share.keep(keep)
                group.keep(keep)
            again = self._updates.came_in()
            if not again:
                try:
                    yield share
                except NotDone:
                    again = self._alone = True
            if again:
                self._waiting.append(group)
                return

    def _fitting(self, limits: DecodingLimits, share: Share | None, columns: int) -> int:
        """Return how many rows of so many columns may be in the model at a time: at least one."""
        return max(1, (limits.tokens - self._others(share)) // (columns + limits.row_tokens))


def _distinct(prompts: Ragged) -> tuple[Ragged, Tensor]:
    """Return the distinct prompts, and for every prompt the number of its distinct one, int64[rows]."""
    padded, which = prompts.to("cpu").to_padded(-1, "left").unique(dim=0, return_inverse=True)
    if len(padded) == len(prompts):
        return prompts, torch.arange(len(prompts))
    return Ragged.from_padded(padded, padded >= 0), which
