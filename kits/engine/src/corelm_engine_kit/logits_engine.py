"""`LogitsEngine`: a backend for whoever can say which logits follow some ids.

The author writes `LogitsEngine.logits`. Sampling, seeds, stopping, streams, scores and aborts are written here, once.

All answers under way grow together, one token a step, whatever call they belong to. A call that arrives joins with the
next step, and an answer that ends leaves. The thread of one caller makes the steps for all: see `Loop`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from corelm.errors import EngineError, described
from corelm.spec import (
    AbortRequest,
    Capabilities,
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    Ragged,
    ScoreRequest,
    ScoreResult,
    WeightUpdate,
    hookimpl,
)
from corelm_engine_kit.answers import AnswerGroup, Answers, answer_seeds
from corelm_engine_kit.ending import answer_limits
from corelm_engine_kit.loop import Call, Loop
from corelm_engine_kit.token_scores import ScoredTokens, TokenQuery, scored_positions, scores_of_logits, scoring_result

T = TypeVar("T")

#: The sampling parameters that are honoured, with every value that `SamplingParams` allows.
_HONOURED = (
    *("temperature", "top_k", "top_p", "min_p", "min_new_tokens", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
#: The most ids whose log-probs are returned at every position, if the vocabulary has as many.
_TOP_K = 1024


def sampled_here(vocab_size: int) -> dict[str, Any]:
    """Return the fields of `Capabilities` of an engine whose logits are sampled and scored by this kit, in a `Loop`."""
    return {
        "vocab_size": vocab_size,
        "sampling": dict.fromkeys(_HONOURED),
        "generation_modes": frozenset({"raw", "processed"}),
        "return_support": True,
        "top_logprobs": min(_TOP_K, vocab_size),
        "score": True,
        "score_temperature": True,
        "logits": True,
        "argmax": True,
        "score_support": True,
        "score_top_k": min(_TOP_K, vocab_size),
        "score_top_ids": True,
        "per_answer_seeds": True,
        "concurrent_calls": True,
        "stops_at_timeout": True,
        "streaming": True,
        "abort": True,
    }


class LogitsEngine:
    """The base class of a backend whose author writes `logits`, and an ``open`` that makes the engine.

    Everything that is written by the author is called on one thread at a time, between or in two steps. `logits` runs
    without gradients.

    Args:
        tokenizer: see `hookspecs.py`. `TemplateTokenizer` makes one of two functions.
        vocab_size: how many logits there are; by default ``len(tokenizer)``.
        max_context: the longest prompt and answer together; None if there is no limit.
        device: where tokens are sampled. Logits are copied there.
        capabilities: other fields of `Capabilities`, or other values of those that are declared by default:
            ``eos_token_ids``, ``empty_prompt=True``, ``gradients=True`` (needs `sequence_logits`),
            ``update_weights=True`` (needs `load_weights`).

    Attributes:
        max_rows: how many rows `logits` takes at a time; None for any number. More rows are passed in several calls.
        max_under_way: how many rows grow at a time, such as the sequences that a KV cache has room for; None for any
            number. The others wait until one of these ends.
    """

    requires_api = ">=1,<2"
    on_caller_threads = True
    max_rows: int | None = None
    max_under_way: int | None = None

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int | None = None,
        max_context: int | None = None,
        device: torch.device | str = "cpu",
        **capabilities: Any,
    ) -> None:
        size = len(tokenizer) if vocab_size is None else vocab_size
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        self.capabilities = Capabilities(max_context=max_context, **{**sampled_here(size), **capabilities})
        # Mangled, like every private name here: the class that an author derives may use any other.
        self.__loop, self.__room = Loop(self.__answer, torch.set_grad_enabled), _Room()

    # Written by the author --------------------------------------------------------------------------------------------

    def logits(self, rows: Sequence[list[int]], caches: Sequence[dict[str, Any]]) -> Any:
        """Return the logits ``[len(rows), vocab_size]`` of the id that follows each row: a tensor or an array.

        If it raises, each row is tried again by itself with an empty cache, so that a row fails alone.

        Args:
            rows: the ids of each row, prompt and answer so far. Do not change or keep them.
            caches: a dict for each row, empty at first, in which you may keep what you like until the row ends, such as
                how many of its ids you have read.
        """
        raise NotImplementedError("define `logits(self, rows, caches)`: the logits of the id that follows each row")

    def sequence_logits(self, ids: list[int], first: int) -> Any:
        """Return the logits that follow ``ids[: first + 1]``, ``ids[: first + 2]`` … ``ids``, one row each.

        Optional: scores are then made in one pass a sequence. Otherwise they are made of `logits`, one position a step.
        With the capability `gradients` the rows may carry a graph; it is then called with gradients enabled, on the
        thread of the caller.
        """
        raise NotImplementedError

    def load_weights(self, update: WeightUpdate) -> None:
        """Load new weights, if the engine declares `update_weights`; raise as the hook of that name.

        No rows are under way, so there are no caches.
        """
        raise NotImplementedError("define `load_weights(self, update)`, or do not declare update_weights")

    def release(self, cache: dict[str, Any]) -> None:
        """Free what the cache of a row that has ended stands for. Optional, and never called for an empty cache."""

    # The hooks --------------------------------------------------------------------------------------------------------

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        with self.__loop.start(request, False) as call:
            return self.__loop.run(call, self.__generation(request, call))

    def __generation(self, request: GenerateRequest, call: Call) -> _Work[GenerateResult]:
        """Answer a request. If the rows have all failed, raise the error of the first."""
        answers, errors, count = Answers(request), list[BaseException](), len(request.prompts)
        prompts, seeds = request.prompts.to("cpu"), answer_seeds(request)
        limits, size = answer_limits(request, self.capabilities.max_context), self.capabilities.vocab_size
        for part in torch.arange(count).split(self.max_under_way or max(1, count)):
            some = prompts.select(part)
            group = AnswerGroup(answers, call, part, some, seeds[part], limits[part], self.tokenizer, size, self.device)
            yield from self.__room.take(len(part), self.max_under_way, call)
            try:
                errors += yield from self.__grow(group, some, call)
            finally:
                self.__room.taken -= len(part)
        if len(errors) == count > 0:
            raise errors[0]
        return answers.result()

    def __grow(self, group: AnswerGroup, prompts: Ragged, call: Call) -> _Work[list[BaseException]]:
        """Sample some answers to their ends, and return the errors of those that failed."""
        rows, left = [_Row(self, row, ids) for row, ids in enumerate(prompts.tolist())], group.wanted()
        errors: list[BaseException] = []
        try:
            while len(left):
                if len(left) < len(rows):
                    going = [rows[place] for place in left.tolist()]
                    for row in {*rows}.difference(going):
                        row.forget()
                    rows = going
                    group.keep(left)
                call.deadline.check()
                logits = yield rows
                failed = {place: row.error for place, row in enumerate(rows) if row.error is not None}
                errors += failed.values()
                why = {place: described(error) for place, error in failed.items()}
                drawn, left = group.sample(logits, read=True, errors=why)
                assert drawn.read is not None
                for row, token in zip(rows, drawn.read[0], strict=True):
                    row.ids.append(token)
        finally:
            for row in rows:
                row.forget()
        return errors

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        with self.__loop.start(request, request.grad) as call:
            return self.__loop.run(call, _Scoring(request, call, self, self.__room).work(), alone=request.grad)

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        self.__loop.abort(frozenset(request.request_ids))
        return True

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        with self.__loop.held():
            self.load_weights(request)
        return True

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        return self.__loop.close()

    # A step -----------------------------------------------------------------------------------------------------------

    def __answer(self, calls: Sequence[Call]) -> None:
        """Give each call float32[rows, V], with NaN for a row that failed, whose `error` says why."""
        rows: list[_Row] = [row for call in calls for row in call.wants]
        try:
            size = self.max_rows or max(1, len(rows))
            parts = [self.__read(rows[at : at + size]) for at in range(0, len(rows), size)]
            logits = torch.cat(parts) if parts else torch.empty(0, self.capabilities.vocab_size)
            for call, some in zip(calls, logits.split([len(call.wants) for call in calls]), strict=True):
                call.give(some)
        except BaseException:
            # The caches are of a step that was half done.
            for call in calls:
                if not call.ready:
                    for row in call.wants:
                        row.forget()
            raise

    def __read(self, rows: Sequence[_Row]) -> Tensor:
        try:
            return _checked(self.logits([row.ids for row in rows], [row.cache for row in rows]), len(rows), self)
        except Exception as error:
            # What is in the caches may be of a step that was half done.
            for row in rows:
                row.forget()
            if len(rows) > 1:
                return torch.cat([self.__read([row]) for row in rows])
            rows[0].error = error
            return torch.full((1, self.capabilities.vocab_size), math.nan, device=self.device)


class _Row:
    """A row of a call that is under way."""

    def __init__(self, engine: LogitsEngine, number: int, ids: list[int]) -> None:
        self.number = number
        self.ids = ids
        self.cache: dict[str, Any] = {}
        self.error: BaseException | None = None
        self._release = engine.release

    def forget(self) -> None:
        """Empty the cache."""
        if self.cache:
            cache, self.cache = self.cache, {}
            self._release(cache)


class _Room:
    """How many rows grow, and the calls that wait for room, in the order in which they came."""

    def __init__(self) -> None:
        self.taken, self._queue = 0, list[Call]()

    def take(self, rows: int, limit: int | None, call: Call) -> _Work[None]:
        """Wait until so many rows more may grow, or the call is aborted. The caller gives the room back."""
        queue, most = self._queue, math.inf if limit is None else limit
        queue.append(call)
        try:
            while rows and call.is_wanted and (queue[0] is not call or self.taken + rows > most):
                call.deadline.check()
                yield []
        finally:
            queue.remove(call)
        self.taken += rows


#: What a call does: it yields the rows whose next logits it wants, and is sent float32[rows, V].
_Work = Generator[list[_Row], Tensor, T]


class _Scoring:
    """A call of `score_logprobs`.

    If the author gives the logits of a whole sequence, each step reads a sequence. Otherwise its rows grow by the ids
    that are given, together with the answers of other calls.
    """

    def __init__(self, request: ScoreRequest, call: Call, engine: LogitsEngine, room: _Room) -> None:
        self._stepwise = type(engine).sequence_logits is LogitsEngine.sequence_logits
        self._request, self._call, self._engine, self._room = request, call, engine, room
        self._scored = scored_positions(request)
        self._sequences = request.sequences.to("cpu")
        self._ids: list[list[int]] = self._sequences.tolist()
        self._starts: list[int] = request.score_from.clamp_min(1).tolist()
        self._parts: list[ScoredTokens] = []
        self._failed: dict[int, BaseException] = {}
        self.rows = [
            _Row(engine, row, self._ids[row][: start if self._stepwise else -1])
            for row, start in enumerate(self._starts)
            if start < len(self._ids[row])
        ]

    def work(self) -> _Work[ScoreResult]:
        """Return the scores, or raise the error of a row if all have failed."""
        asked, engine = len(self.rows), self._engine
        room = min(asked, engine.max_under_way or asked) if self._stepwise else 0
        yield from self._room.take(room, engine.max_under_way, self._call)
        try:
            while self._wanted():
                if self._stepwise:
                    rows = self.rows[: engine.max_under_way]
                    self._advance(rows, (yield rows))
                else:
                    # Other calls go on after each sequence.
                    yield []
                    self._read(self.rows.pop(0))
        finally:
            self._room.taken -= room
            for row in self.rows:
                row.forget()
        if self._failed and len(self._failed) == asked:
            raise next(iter(self._failed.values()))
        failed = {row: described(error) for row, error in self._failed.items()}
        size = engine.capabilities.vocab_size
        return scoring_result(self._request, self._scored, self._parts, size, failed)

    def _wanted(self) -> bool:
        """Drop the rows that were aborted, and return whether any is left."""
        self._call.deadline.check()
        for row in self.rows:
            if row.number in self._call.aborted:
                row.forget()
        self.rows = [row for row in self.rows if row.number not in self._call.aborted]
        return bool(self.rows)

    def _advance(self, rows: Sequence[_Row], logits: Tensor) -> None:
        self._score(logits, [(row.number, len(row.ids)) for row in rows])
        for row in rows:
            if row.error is not None:
                self._failed[row.number] = row.error
            row.ids.append(self._ids[row.number][len(row.ids)])
            if row.error is not None or len(row.ids) == len(self._ids[row.number]):
                row.forget()
                self.rows = [each for each in self.rows if each is not row]

    def _read(self, row: _Row) -> None:
        start, end = self._starts[row.number], len(row.ids) + 1
        try:
            found = self._engine.sequence_logits(row.ids, start - 1)
            made = _checked(found, end - start, self._engine)
        except Exception as error:
            self._failed[row.number] = error
        else:
            self._score(made, [(row.number, position) for position in range(start, end)])

    def _score(self, logits: Tensor, positions: Sequence[tuple[int, int]]) -> None:
        """Score the ids at some (row, position), given the logits that predict them."""
        offsets = self._sequences.offsets
        index = torch.tensor([int(offsets[row]) + position for row, position in positions])
        query = TokenQuery.of(self._request, self._sequences.values[index], index)
        scores = scores_of_logits(logits, query.to(logits.device))
        device = self._request.device or self._request.sequences.values.device
        self._parts.append(ScoredTokens(index, scores).to(device))


def _checked(found: Any, count: int, engine: LogitsEngine) -> Tensor:
    """Return what the author's code returned as float32[count, V] on the engine's device."""
    logits = found if isinstance(found, Tensor) else torch.tensor(found)
    expected = (count, engine.capabilities.vocab_size)
    if tuple(logits.shape) != expected:
        raise EngineError(f"expected logits of shape {expected}, rows × vocabulary, got {tuple(logits.shape)}")
    return logits.to(engine.device, torch.float32)
