"""`Decoder`: answers that grow token by token, with the log-probability of each token as it is chosen.

Equal prompts share their prefill, and a row leaves the batch when it ends. Rows of several calls share their steps, as
far as the model can read them together. The model's generation config is not read here, so nothing in it can change
what was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeGuard, get_args

import torch
from torch import Tensor

from corelm.errors import EngineError, described
from corelm.spec import GenerateRequest, GenerateResult, Ragged
from corelm_engine_kit import RowVersions, VersionLog
from corelm_engine_kit.answers import AnswerGroup, Answers, without
from corelm_engine_kit.ending import answer_limits
from corelm_engine_kit.loop import Aborted, Call, NotDone
from corelm_engine_kit.masses import log_softmax_at
from transformers_backend.continuation import CachedRows, GrowingRows, Share, UncachedRows
from transformers_backend.engine import CausalLM
from transformers_backend.memory import CacheBytes, DecodingLimits, decoding_limits, measured_cache
from transformers_backend.protocol import Grouping, PromptBatch, batches_of, generation_prompts
from transformers_backend.self_test import TAIL, TAKES_NO_CACHE, OwnRow, SelfTest
from transformers_backend.trials import with_others

_log = logging.getLogger(__name__)

#: How prompts are decoded, fastest first. Each is tried on the model before it is used; the last always is right.
DecodingWay = Literal["cached and padded", "cached", "uncached", "uncached, one at a time"]
_WAYS: tuple[DecodingWay, ...] = get_args(DecodingWay)
_GROUPING: dict[DecodingWay, Grouping] = dict(zip(_WAYS, ("padded", "equal", "equal", "alone"), strict=True))
_NO_CACHE = (
    "about 4 times as long for answers of 32 tokens, and more for longer ones: each token reads its whole row again"
)
#: For each slower way, what the warning says is done, and how long that takes.
_SLOWER: dict[DecodingWay, tuple[str, str]] = {
    "cached": (
        "only prompts of the same length are decoded together",
        "up to as many times as long as there are lengths",
    ),
    "uncached": ("answers are decoded without a cache", _NO_CACHE),
    "uncached, one at a time": ("answers are decoded without a cache and one at a time", _NO_CACHE),
}
#: How many tokens an answer without a limit counts when batches are made. If answers become longer, some rows of their
#: batch wait.
EXPECTED_TOKENS = 512
#: Number of tokens by which trial rows are continued.
_TRIED = 3
#: How rows that were read apart go on together, and how a beam search decodes: with transformers' own cache.
_JOINED, _GROWING = "joined", "growing cached"
#: How many times as many tokens rows may have together as apart, with padding.
_WASTE = 2


class MustBeAlone(Exception):
    """The model keeps more of its rows than a cache holds, so no others may be read in between."""


class Decoder:
    """Answers requests.

    Attributes:
        accelerated: returns the context in which the model decodes.
        way: how the latest batch was decoded; None before the first.
        keeps_states: whether the model was seen to keep more of its rows than a cache holds.
    """

    def __init__(
        self,
        engine: CausalLM,
        tokenizer: Any,
        self_test: SelfTest,
        max_batch_tokens: int | None,
        accelerated: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.accelerated = accelerated
        self.way: DecodingWay | None = None
        self.keeps_states = False
        self._engine = engine
        self._tokenizer = tokenizer
        self._self_test = self_test
        self._max_batch_tokens = max_batch_tokens
        self._cache_bytes: CacheBytes | None = None
        # What is in the model.
        self._growing: list[GrowingRows] = []

    @property
    def info(self) -> str:
        """How it decodes, with the cause if that is a slower way; "" before the first batch."""
        if self.way is None:
            return "" if self._engine.accepts_cache else f"uncached: {TAKES_NO_CACHE}"
        return self._self_test.explained(self.way, _SLOWER[self.way][0] if self.way in _SLOWER else None)

    def generate(
        self, request: GenerateRequest, call: Call, updates: CallUpdates
    ) -> Generator[Share | None, None, GenerateResult]:
        """Answer every prompt, as the work of a call. An aborted row ends with the step of decoding under way.

        Raises:
            Aborted: all rows were aborted before the first of them was begun.
            MustBeAlone: nothing was done; make the call alone.
        """
        self._self_test.begin(call.check_wanted)
        prompts, answers = generation_prompts(request, self._engine), Answers(request)
        yield from self._answer(prompts, answers, call, updates)
        return answers.result()

    def step(self, calls: Sequence[Call]) -> None:
        """Append their tokens to the rows of some calls, of which all want that; see `Loop`."""
        shares: list[Share] = [call.wants for call in calls]
        if len(shares) > 1:
            self._join(shares)
        for growing in dict.fromkeys(share.growing for share in shares):
            some = [call for call in calls if call.wants.growing is growing]
            try:
                if len(some) > 1 and not self._self_test.is_confirmed(_JOINED, growing.columns + 1):
                    raise NotDone
                growing.step()
                answer: BaseException | None = None
            except BaseException as error:
                answer = error if len(some) == 1 else NotDone()
            for call in some:
                call.give(answer)

    def may_use_cache(self, request: GenerateRequest, call: Call) -> bool:
        """Return whether decoding with a cache gives the numbers of the plain forward, up to the longest answer that
        the request allows.
        """
        test, lengths = self._self_test, request.prompts.lengths
        test.begin(call.check_wanted)
        columns = int((lengths + answer_limits(request, self._engine.max_context)).max())
        prompt = request.prompts.split()[int(lengths.argmax())].cpu()
        row = prompt.repeat(-(-columns // len(prompt)))[:columns]

        def may_run(way: str) -> bool:
            if not (self._engine.accepts_cache and test.may_run(way, partial(self._continued, way, 2), padded=False)):
                return False
            return self._confirmed_on(way, [row])

        with self._engine.evaluating():
            right = test.choose((_GROWING, "uncached"), may_run) == _GROWING
        if not right:
            test.warn_once(*_SLOWER["uncached"])
        return right

    def _answer(
        self, prompts: PromptBatch, answers: Answers, call: Call, updates: CallUpdates
    ) -> Generator[Share | None, None, None]:
        """Answer prompts, batch by batch. If the log-probs of a batch turn out to be wrong, it and all later ones are
        decoded in another way.

        Raises:
            EngineError: they are wrong, and the tokens were streamed to a caller, from whom they cannot be taken back.
        """
        request, engine = answers.request, self._engine
        way = self._way(prompts, request)
        if self.keeps_states and not call.key.alone:
            raise MustBeAlone
        limits, done = self.limits(int(prompts.prompts.lengths.max())), torch.empty(0, dtype=torch.int64)
        expected = EXPECTED_TOKENS if request.sampling.max_new_tokens is None else None
        for batch in batches_of(prompts, _GROUPING[way], engine, limits, expected):
            done = torch.cat([done, batch.rows])
            if call.key.decoding:
                yield from _switched(call, decoding=False)
            if gone := call.aborted_among(batch.rows):
                batch = batch.select(torch.tensor([row for row in range(len(batch.rows)) if row not in gone]).long())
                if not len(batch.rows):
                    continue
            ragged = len(set(batch.prompts.lengths.tolist())) > 1
            self.way = used = "cached" if way == "cached and padded" and not ragged else way
            columns = _columns(batch.prompts.lengths, batch.limits)
            steps = int(batch.limits.max()) - 1
            check = used != _WAYS[-1] and not self._self_test.is_confirmed(used, columns, steps)
            changes, first = updates.changes, len(answers.steps)
            # Earlier batches keep their answers, and there need be no memory for what only saves time.
            with suppress(Aborted, torch.OutOfMemoryError):
                self._try_joining(used, batch)
            yield from _switched(call, decoding=True, verdict=self._self_test.now)
            run = BatchDecoding(self, used, answers, call, updates, keep_raw=check)
            own = (batch.rows, batch.prompts, batch.seeds, batch.limits)
            group = AnswerGroup(answers, call, *own, self._tokenizer, engine.vocab_size, engine.device)
            yield from run.run(group, batch.prompts, limits)
            # The weights that the first of the tokens were sampled with may be gone: then there is nothing to compare.
            # Batches that come later are of the new weights alone.
            updates.came_in()
            if not check or updates.changes > changes:
                continue
            yield from _switched(call, decoding=False)
            if not self._confirmed(used, batch, answers, run.raw):
                if request.on_tokens is not None:
                    raise EngineError(
                        "the streamed log-probs turned out to be others than those of the model's own forward; "
                        "ask again, the next call decodes in a slower way",
                        usable=True,
                    )
                answers.take_back(first)
                left = ~torch.isin(prompts.rows, done) | torch.isin(prompts.rows, batch.rows)
                yield from self._answer(prompts.select(left.nonzero()[:, 0]), answers, call, updates)
                return

    def _confirmed(self, way: DecodingWay, batch: PromptBatch, answers: Answers, raw: list[Tensor]) -> bool:
        """Return whether the log-probs of a batch are right, as far as these rows show: the last of the longest, the
        first of the most padded, and of those with the longest answer the most padded.
        """
        ids = answers.ids().select(batch.rows)
        found = answers.by_row(raw, answers.steps[-len(raw) :]).select(batch.rows)
        prompts, lengths = batch.prompts.lengths, ids.lengths
        columns = _columns(prompts, lengths)
        furthest = (lengths * (columns + 1) - prompts).argmax()
        longest = (prompts + lengths).argsort(stable=True)[-1]
        rows = sorted({int(longest), int(prompts.argmin()), int(furthest)})
        sequences = batch.prompts.to("cpu").join(ids).select(rows).split()
        ends = (
            OwnRow(ids[:-1], raw[-2 * TAIL :], with_others(ids[-len(raw) :][-2 * TAIL :], self._engine.vocab_size))
            for ids, raw in zip(sequences, found.select(rows).split(), strict=True)
        )
        # The first token comes from reading the prompt, and shows nothing of a cache.
        return self._self_test.confirm(way, columns, ends, min(2 * TAIL, int(lengths.max())) - 1)

    def _confirmed_on(self, way: str, rows: list[Tensor]) -> bool:
        """Return whether continuing rows of ids gives the numbers of the plain forward, as wide as the longest is."""
        ends = self._continued(way, 2, Ragged.from_list(rows))
        return self._self_test.confirm(way, max(map(len, rows)), (OwnRow(rows[row], found) for row, found in ends))

    # Several calls ----------------------------------------------------------------------------------------------------

    def in_the_model(self, share: Share | None = None) -> int:
        """Return how many tokens are in the model, apart from those of a share."""
        self._growing = [each for each in self._growing if each.shares]
        tokens = sum(len(each) * each.columns for each in self._growing)
        return tokens if share is None else tokens - len(share.rows) * share.growing.columns

    def _try_joining(self, way: DecodingWay, batch: PromptBatch) -> None:
        """Find out whether a batch may go on together with rows that are in the model, if there are any."""
        test = self._self_test
        tokens, others = self.in_the_model(), [each for each in self._growing if _joins(each)]
        if not (tokens and others) or not way.startswith("cached") or self._engine.rope_switch is not None:
            return
        widest = max(int(batch.prompts.lengths.max()), *(each.columns for each in others))
        columns = widest + min(int(batch.limits.max()), EXPECTED_TOKENS)
        columns = min(columns, self._engine.max_context or columns)
        if test.is_confirmed(_JOINED, columns) or test.is_refuted(_JOINED, columns):
            return
        if test.may_run(_JOINED, partial(self._continued, _JOINED, 2), fixed=True):
            row = test.row.cpu()
            row = row.repeat(-(-columns // len(row)))[:columns]
            self._confirmed_on(_JOINED, [row, row[: max(_TRIED + 1, columns // 2)]])

    def _join(self, shares: Sequence[Share]) -> None:
        """Make one of rows that were read apart, where that is right and does not pay for itself in padding."""
        joining = [each for each in dict.fromkeys(share.growing for share in shares) if _joins(each)]
        for growing in joining[1:]:
            first = joining[0]
            columns = max(first.columns, growing.columns)
            apart = len(first) * first.columns + len(growing) * growing.columns
            together = (len(first) + len(growing)) * columns
            limit = min(share.most for share in [*first.shares, *growing.shares])
            if together <= min(limit, _WASTE * apart) and self._self_test.is_confirmed(_JOINED, columns + 1):
                try:
                    first.join(growing)
                except Exception as error:
                    # They need not share steps.
                    _log.warning("rows of several calls are decoded apart: %s", described(error))
                    for share in growing.shares:
                        share.alone = True

    # Which way --------------------------------------------------------------------------------------------------------

    def _way(self, prompts: PromptBatch, request: GenerateRequest) -> DecodingWay:
        """Return the fastest way that is right for these prompts, answers included."""
        lengths = prompts.prompts.lengths
        columns = _columns(lengths, prompts.limits)
        # Tokens that were streamed cannot be taken back, so all that decoding does is tried before.
        depth = 1 if request.on_tokens is None else 2
        ways = _WAYS if len(lengths.unique()) > 1 else _WAYS[1:]
        may_run = partial(self._may_run, depth=depth, columns=columns)
        way = self._self_test.choose(ways, may_run)
        if way != ways[0]:
            self._self_test.warn_once(*_SLOWER[way])
        return way

    def _may_run(self, way: DecodingWay, *, depth: int, columns: int) -> bool:
        if way.startswith("cached") and not self._engine.accepts_cache:
            return False
        cached = ("cached", "cached and padded")
        if way in cached and any(self._self_test.now.records[each].fault for each in cached):
            # Rows of a caller have shown a fault of the cache. Shorter rows use it only if it is right to the end.
            depth = 2
        padded = way == "cached and padded"
        # A batch whose rows happen to be of one length is not padded, so that way has to be right as well.
        if padded and depth > 1 and not self._may_run("cached", depth=depth, columns=columns):
            return False
        if padded and self._self_test.is_refuted("cached", columns):
            return False
        for each in (depth, 2):
            run, fixed = partial(self._continued, way, each), way.startswith("cached")
            if not self._self_test.may_run(way, run, padded=padded, depth=each, fixed=fixed):
                return False
            if self._self_test.is_refuted(way, columns):
                return False
            if way.startswith("uncached") or not self._engine.keeps_states:
                break
            self.keeps_states = True
        return True

    def _continued(self, way: str, depth: int, rows: Ragged) -> Iterator[tuple[int, Tensor]]:
        """Yield every row's number and the logits of its last positions, ``[n, vocab]``, as decoding makes them.

        With a depth of 1 the last id of each is appended. With 2 the last few ids of each are appended, and the first
        row is expanded to two, one of which leaves after a step.
        """
        ids, alive = rows.split(), torch.arange(len(rows))
        steps = min(_TRIED if depth > 1 else 1, int(rows.lengths.min()) - 1)
        prompts = Ragged.from_list([row[: len(row) - steps] for row in ids])
        tokens = torch.stack([row[-1 - steps :][1:] for row in ids]).to(self._engine.device)
        with self.accelerated():
            growing = self._start(way, prompts)
            if depth > 1:
                alive = torch.tensor([0, *range(len(rows))])
                growing.expand(alive)
            made = [growing.logits[-len(rows) :]]
            for step in range(steps):
                if step == 1:
                    left = without({1}, len(alive))
                    alive = alive[left]
                    growing.keep(left)
                growing.append(tokens[alive.to(tokens.device), step])
                made.append(growing.logits[alive.argsort(stable=True)][-len(rows) :])
        for number in range(len(rows)):
            yield number, torch.stack([logits[number] for logits in made])

    def limits(self, longest: int) -> DecodingLimits:
        """Return how many rows, of so many tokens at most, are decoded at a time: as the user said, or what fits into
        the memory that is free.
        """
        if self._max_batch_tokens is not None:
            return DecodingLimits(self._max_batch_tokens)
        if self._cache_bytes is None and self._engine.device.type == "cuda":
            self._cache_bytes = measured_cache(self._engine)
        return decoding_limits(self._engine, self._cache_bytes, longest)

    # Decoding ---------------------------------------------------------------------------------------------------------

    def enter(self, way: str, prompts: Ragged) -> GrowingRows:
        """Return the prompts inside the model, among all that are in it."""
        self._growing.append(self._start(way, prompts))
        return self._growing[-1]

    def _start(self, way: str, prompts: Ragged) -> GrowingRows:
        if way.startswith("uncached"):
            return UncachedRows(self._engine, prompts)
        if way != _JOINED:
            return CachedRows(self._engine, prompts, fixed=way != _GROWING)
        first, *others = (CachedRows(self._engine, Ragged.from_list([row])) for row in prompts.split())
        for each in others:
            first.join(each)
        return first


def _switched(call: Call, **changes: Any) -> Generator[None, None, None]:
    """Go on within another key."""
    call.key = replace(call.key, **changes)
    yield None


def _joins(growing: GrowingRows) -> TypeGuard[CachedRows]:
    """Return whether rows of other calls may join these."""
    return isinstance(growing, CachedRows) and growing.may_join and not any(share.alone for share in growing.shares)


def _columns(prompts: Tensor, answers: Tensor) -> int:
    """Return the width of a batch of prompts padded on the left and their answers, given their lengths, int64[rows]."""
    return int(prompts.max() + answers.max())


class BatchDecoding:
    """Answers the prompts of one batch.

    The rows of a batch grow together, one token a step, and a row leaves when it ends. If the rows grow wider than may
    be read at a time, because answers became longer than expected or other calls came, half of them wait. They go on
    when the others have ended: their prompts and the answers so far are read again, and their streams of random numbers
    go on where they were. So do all rows of a batch after a step that was not made.

    Args:
        decoder: keeps the rows.
        way: how they are decoded.
        answers, call, updates: of the request that it is part of.
        keep_raw: whether to keep the model's own log-probs.

    Attributes:
        raw: of each step float32 ``[n, 2]``: the model's own log-probs of the ids that `trials.with_others` makes of
            those sampled, whatever log-probs are asked for.
    """

    def __init__(
        self, decoder: Decoder, way: str, answers: Answers, call: Call, updates: CallUpdates, *, keep_raw: bool
    ) -> None:
        self.raw: list[Tensor] = []
        self._decoder, self._way, self._keep_raw = decoder, way, keep_raw
        self._answers, self._call, self._updates = answers, call, updates
        # Whether its rows share no forward pass with those of other calls, because that has failed.
        self._alone = False
        self._waiting: list[AnswerGroup] = []

    def run(self, group: AnswerGroup, prompts: Ragged, limits: DecodingLimits) -> Generator[Share, None, None]:
        """Answer the prompts of a group. It yields the rows that are to be appended their tokens.

        `limits` were known before the first prompt is read.
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
        limits = self._decoder.limits(int(rows.lengths.max()))
        fit = self._fitting(limits, None, int(rows.lengths.max()) + 1)
        if fit < len(rows):
            self._waiting.append(group.of(torch.arange(fit, len(rows))))
            group, rows = group.of(torch.arange(fit)), rows.select(torch.arange(fit))
        yield from self._run(group, rows, limits)

    def _run(self, group: AnswerGroup, rows: Ragged, limits: DecodingLimits) -> Generator[Share, None, None]:
        """Read the rows of a group, and let them grow until all have ended or wait."""
        self._updates.came_in()
        distinct, answers = _distinct(rows)
        growing = self._decoder.enter(self._way, distinct)
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
        return max(1, (limits.tokens - self._decoder.in_the_model(share)) // (columns + limits.row_tokens))


def _distinct(prompts: Ragged) -> tuple[Ragged, Tensor]:
    """Return the distinct prompts, and for every prompt the number of its distinct one, int64[rows]."""
    padded, which = prompts.to("cpu").to_padded(-1, "left").unique(dim=0, return_inverse=True)
    if len(padded) == len(prompts):
        return prompts, torch.arange(len(prompts))
    return Ragged.from_padded(padded, padded >= 0), which


class CallUpdates:
    """What a call that samples has to do with updates.

    Args:
        log, request: the weights that the model has, and what is asked.
        rereads: whether rows are read again with new weights, so that no keys and values of old ones are left.

    Attributes:
        changes: how often the weights were others than before, in the course of the call.
        rows: which weights sampled which token.
    """

    def __init__(self, log: VersionLog, request: GenerateRequest, *, rereads: bool) -> None:
        self.changes = 0
        self._log, self._request, self._rereads = log, request, rereads
        self._version, self._number = log.now(request), log.number
        self.rows = RowVersions(len(request.prompts), self._version)

    def came_in(self) -> bool:
        """Look for updates before the model reads tokens; return whether the rows in it have to be read again."""
        if self._log.number == self._number:
            return False
        self._version, self._number = self._log.now(self._request), self._log.number
        self.changes += 1
        return self._rereads

    def sampled(self, rows: Tensor, first: int) -> None:
        """Note that rows get their token `first`, from logits that were computed since the last `came_in`.

        Args:
            rows: int64[n], rows of the request.
            first: the position of the token in the answer.
        """
        if self.changes:
            for row in rows.tolist():
                self.rows.sampled(row, first, self._version)
