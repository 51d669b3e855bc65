"""`BatchDecoding`: the steps of decoding that answer the prompts of one batch.

The rows of a batch grow together, one token a step, and a row leaves when it ends. If the rows grow wider than may be
read at a time, because answers became longer than expected or other calls came, half of them wait. They go on when the
others have ended: their prompts and the answers so far are read again, and their streams of random numbers go on where
they were. So do all rows of a batch after a step that was not made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from corelm.errors import EngineError, spelled_out
from corelm.spec import GenerateRequest, Ragged, TokenChunk, TopIds
from corelm_engine_kit.ending import AnswerEnding
from corelm_engine_kit.loop import Call, NotDone
from corelm_engine_kit.masses import KeptIds, log_softmax_at
from corelm_engine_kit.sampling import NOT_NUMBERS, Drawn, Sampler
from transformers_backend.continuation import GrowingRows, Share, without
from transformers_backend.in_flight import CallUpdates
from transformers_backend.memory import DecodingLimits
from transformers_backend.protocol import PromptBatch, SampledAnswers
from transformers_backend.trials import with_others


@dataclass(frozen=True, eq=False)
class _Group:
    """Answers that grow together.

    Attributes:
        places: int64[n] on the CPU, their places in the batch.
        sampler, ending: theirs.
    """

    places: Tensor
    sampler: Sampler
    ending: AnswerEnding

    def of(self, rows: Tensor) -> _Group:
        """Return a group of these rows, int64[k] on the CPU. This one may go on as it is."""
        return _Group(self.places[rows], self.sampler.of(rows), self.ending.of(rows))


class BatchDecoding:
    """Answers the prompts of one batch.

    Args:
        batch: the prompts.
        request, call, updates: what they are part of.
        sampler, ending: for all of them.
        start: puts rows of ids into the model.
        limits: returns how many tokens may be decoded at a time, given the length of the longest row in the model.
        others: returns how many tokens of other calls are in the model.
        keep_raw: whether to keep the model's own log-probs, see `SampledAnswers.raw`.
    """

    def __init__(
        self,
        batch: PromptBatch,
        request: GenerateRequest,
        call: Call,
        updates: CallUpdates,
        sampler: Sampler,
        ending: AnswerEnding,
        start: Callable[[Ragged], GrowingRows],
        limits: Callable[[int], DecodingLimits],
        others: Callable[[Share | None], int],
        *,
        keep_raw: bool,
    ) -> None:
        self._batch = batch
        self._request = request
        self._call = call
        self._updates = updates
        self._start = start
        self._limits = limits
        self._others = others
        # Whether its rows share no forward pass with those of other calls, because that has failed.
        self._alone = False
        self._keep_raw = keep_raw
        self._stopped, self._aborted = torch.zeros(2, len(batch.rows), dtype=torch.bool)
        self._steps: list[tuple[Tensor, ...]] = []
        self._kept: list[KeptIds] = []
        self._top: list[TopIds] = []
        self._waiting = [_Group(torch.arange(len(batch.rows)), sampler, ending)]

    def run(self, limits: DecodingLimits) -> Generator[Share, None, SampledAnswers]:
        """Return the answers. It yields the rows that are to be appended their tokens.

        Args:
            limits: how many tokens may be decoded at a time, known before the first prompt is read.
        """
        yield from self._run(self._waiting.pop(), self._batch.prompts, limits)
        while self._waiting:
            yield from self._go_on(self._waiting.pop())
        ids, logprobs, *raw = self._answers()
        order, lengths = self._order()
        kept = log_mass = top = None
        if self._kept:
            kept, log_mass = KeptIds.ordered(self._kept, order, lengths)
        if self._top:
            top = TopIds.cat(self._top, self._request.top_logprobs)
            top = TopIds(top.ids[order], top.logprobs[order], top.tail[order])
        return SampledAnswers(ids, logprobs, self._stopped, self._aborted, raw[0] if raw else None, kept, log_mass, top)

    def _answers(self) -> list[Ragged]:
        """Return the ids so far and their numbers, in the order of the batch."""
        order, lengths = self._order()
        _, *columns = (torch.cat(column).cpu() for column in zip(*self._steps, strict=True))
        return [Ragged(column[order], lengths) for column in columns]

    def _order(self) -> tuple[Tensor, Tensor]:
        """Return where the tokens of all steps stand in the order of the batch, int64[n], and how many each row has."""
        which = torch.cat([alive for alive, *_ in self._steps])
        return which.argsort(stable=True), which.bincount(minlength=len(self._batch.rows))

    def _go_on(self, group: _Group) -> Generator[Share, None, None]:
        """Read the rows of a group that has waited, and let them grow."""
        if gone := self._call.aborted_among(self._batch.rows[group.places]):
            self._aborted[group.places[list(gone)]] = True
            if len(gone) == len(group.places):
                return
            group = group.of(without(gone, len(group.places)))
        rows = self._batch.prompts.to("cpu").join(self._answers()[0]).select(group.places)
        limits = self._limits(int(rows.lengths.max()))
        fit = self._fitting(limits, None, int(rows.lengths.max()) + 1)
        if fit < len(rows):
            self._waiting.append(group.of(torch.arange(fit, len(rows))))
            group, rows = group.of(torch.arange(fit)), rows.select(torch.arange(fit))
        yield from self._run(group, rows, limits)

    def _run(self, group: _Group, rows: Ragged, limits: DecodingLimits) -> Generator[Share, None, None]:
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

    def _grow(self, group: _Group, share: Share, limits: DecodingLimits) -> Generator[Share, None, None]:
        request, call, batch = self._request, self._call, self._batch
        alive, sampler, ending = group.places, group.sampler, group.ending
        while True:
            call.deadline.check()
            logits = share.logits
            drawn = sampler(logits, read=ending.reads_ids or request.on_tokens is not None)
            compared = with_others(drawn.ids, logits.shape[-1]) if self._keep_raw else None
            raw = () if compared is None else (log_softmax_at(logits, compared),)
            self._steps.append((alive, drawn.ids, drawn.logprobs, *raw))
            if drawn.kept is not None:
                self._kept.append(drawn.kept)
            if drawn.top is not None:
                self._top.append(drawn.top)
            ended = ending(None if drawn.read is None else drawn.read[0])
            self._updates.sampled(batch.rows, alive, ending.length - 1)
            if request.on_tokens is not None:
                _hand_over(request.on_tokens, batch.rows[alive], drawn, ended)
            if request.on_answer is not None and ended:
                for row in batch.rows[alive[list(ended)]].tolist():
                    request.on_answer(row, ending.length)
            if call.aborted:
                for place in call.aborted_among(batch.rows[alive]) - ended.keys():
                    self._aborted[alive[place]] = ended[place] = True
            if ended:
                self._stopped[alive[list(ended)]] = torch.tensor(list(ended.values()))
                if len(ended) == len(alive):
                    return
            keep = without(ended, len(alive))
            fit = self._fitting(limits, share, share.growing.columns + 1)
            if fit < len(keep):
                # Half of them, so that the others may grow to twice their length before some wait again.
                fit = max(1, min(fit, len(keep) // 2))
                self._waiting.append(_Group(alive, sampler, ending).of(keep[fit:]))
                keep = keep[:fit]
            share.tokens = drawn.ids
            if len(keep) < len(alive):
                alive, share.tokens = alive[keep], drawn.ids[keep.to(drawn.ids.device)]
                share.keep(keep)
                sampler.keep(keep)
                ending.keep(keep)
            again = self._updates.came_in()
            if not again:
                try:
                    yield share
                except NotDone:
                    again = self._alone = True
            if again:
                self._waiting.append(_Group(alive, sampler, ending).of(torch.arange(len(alive))))
                return

    def _fitting(self, limits: DecodingLimits, share: Share | None, columns: int) -> int:
        """Return how many rows of so many columns may be in the model at a time: at least one."""
        return max(1, (limits.tokens - self._others(share)) // (columns + limits.row_tokens))


def _hand_over(on_tokens: Callable[[TokenChunk], None], rows: Tensor, drawn: Drawn, ended: Mapping[int, bool]) -> None:
    """Hand over one token of each row. `ended` has the rows that it ended, False for a length limit.

    Raises:
        EngineError: the logits of some rows are not numbers, so that their tokens are none.
    """
    assert drawn.read is not None
    if odd := [row for row, logprob in zip(rows.tolist(), drawn.read[1], strict=True) if math.isnan(logprob)]:
        problems = dict.fromkeys(odd, NOT_NUMBERS)
        raise EngineError(spelled_out(problems), usable=True, problems=problems)
    for place, (row, token, logprob) in enumerate(zip(rows.tolist(), *drawn.read, strict=True)):
        reason = {None: None, True: "stop", False: "length"}[ended.get(place)]
        on_tokens(TokenChunk(row=row, ids=[token], logprobs=[logprob], finish_reason=reason))


def _distinct(prompts: Ragged) -> tuple[Ragged, Tensor]:
    """Return the distinct prompts, and for every prompt the number of its distinct one, int64[rows]."""
    padded, which = prompts.to("cpu").to_padded(-1, "left").unique(dim=0, return_inverse=True)
    if len(padded) == len(prompts):
        return prompts, torch.arange(len(prompts))
    return Ragged.from_padded(padded, padded >= 0), which
