"""`LogitsEngine`: a backend for whoever can say which logits follow some ids.

The author writes `LogitsEngine.logits`. Sampling, seeds, stopping, streams, scores and aborts are written here, once.

All answers under way grow together, one token a step, whatever call they belong to. A call that arrives joins with the
next step, and an answer that ends leaves. One thread, `_Loop`, makes the steps and owns everything that changes; the
callers wait for futures.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from corelm.errors import EngineError, described
from corelm.spec import (
    AbortRequest,
    Capabilities,
    CloseRequest,
    Deadline,
    GenerateRequest,
    GenerateResult,
    RowAnswer,
    RowFailure,
    ScoreRequest,
    ScoreResult,
    TokenChunk,
    TopIds,
    WeightUpdate,
    generate_result,
    hookimpl,
)
from corelm.waiting import done_within
from corelm_engine_kit.ending import AnswerEnding, answer_limits
from corelm_engine_kit.sampling import NOT_NUMBERS, Sampler
from corelm_engine_kit.token_scores import ScoredTokens, TokenQuery, scored_positions, scores_of_logits, scoring_result

T = TypeVar("T")

#: The sampling parameters that are honoured, with every value that `SamplingParams` allows.
_HONOURED = (
    *("temperature", "top_k", "top_p", "min_p", "min_new_tokens", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
#: The most ids whose log-probs are returned at every position, if the vocabulary has as many.
_TOP_K = 1024
#: Seconds that closing waits for the step under way.
_PATIENCE = 5.0


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
        declared: dict[str, Any] = {
            "sampling": dict.fromkeys(_HONOURED),
            "generation_modes": frozenset({"raw", "processed"}),
            "return_support": True,
            "top_logprobs": min(_TOP_K, size),
            "score": True,
            "score_temperature": True,
            "logits": True,
            "argmax": True,
            "score_support": True,
            "score_top_k": min(_TOP_K, size),
            "score_top_ids": True,
            "per_answer_seeds": True,
            "concurrent_calls": True,
            "stops_at_timeout": True,
            "streaming": True,
            "abort": True,
        }
        self.capabilities = Capabilities(vocab_size=size, max_context=max_context, **{**declared, **capabilities})
        self._loop = _Loop(self)

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
        rows = range(len(request.request_ids))
        # A row that waits for others to end samples by itself.
        parts = [rows] if self.max_under_way is None else [rows[row : row + 1] for row in rows]
        done = self._loop.run([_Generation(request, self, part) for part in parts], request.timeout)
        errors = [error for part in done for error in part.errors]
        if len(errors) == len(rows) > 0:
            raise errors[0]
        outcomes = {row: outcome for part in done for row, outcome in part.outcomes.items()}
        return generate_result(request, [outcomes[row] for row in rows])

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        scoring = _Scoring(request, self)
        if not request.grad:
            return self._loop.run([scoring], request.timeout)[0]
        deadline = Deadline(request.timeout)
        with self._loop.held(), torch.enable_grad():
            while not scoring.future.done():
                deadline.check()
                scoring.advance(torch.empty(0))
        return scoring.future.result()

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        self._loop.tell(self._loop.abort, frozenset(request.request_ids))
        return True

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        with self._loop.held():
            self.load_weights(request)
        return True

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        return self._loop.close()


class _Row:
    """A row of a call that is under way."""

    def __init__(self, engine: LogitsEngine, number: int, name: str, ids: list[int]) -> None:
        self.number = number
        self.name = name
        self.ids = ids
        self.cache: dict[str, Any] = {}
        self.error: BaseException | None = None
        self._release = engine.release

    def forget(self) -> None:
        """Empty the cache."""
        if self.cache:
            cache, self.cache = self.cache, {}
            self._release(cache)


class _Call(ABC):
    """A call that is under way.

    Attributes:
        rows: those that go on.
        wants_logits: whether it goes on by the next logits of its rows.
        future: its result.
    """

    rows: list[_Row]
    wants_logits = True

    def __init__(self) -> None:
        self.future = Future[Any]()

    @abstractmethod
    def advance(self, logits: Tensor) -> None:
        """Go on by one step, given float32[rows, V] if it `wants_logits`."""

    @abstractmethod
    def abort(self, names: Collection[str]) -> None:
        """End the rows with these names."""

    def fail(self, error: BaseException) -> None:
        self.leave()
        self.future.set_exception(error)

    def leave(self) -> None:
        for row in self.rows:
            row.forget()
        self.rows = []


class _Generation(_Call):
    """A call of `generate`, or some of its rows. It is its own result.

    Attributes:
        outcomes: of the rows that have ended, by their numbers in the request.
        errors: why rows failed.
    """

    def __init__(self, request: GenerateRequest, engine: LogitsEngine, numbers: Sequence[int]) -> None:
        super().__init__()
        own = torch.tensor(numbers, dtype=torch.int64)
        prompts = request.prompts.to("cpu").select(own)
        # As many as there are prompts, if the request leaves them to the engine.
        seeds = torch.randint(2**63 - 1, (len(prompts),)) if request.seeds is None else request.seeds.cpu()[own]
        self._request = request
        self._sampler = Sampler(
            request.sampling,
            prompts,
            seeds,
            request.stop_ids,
            engine.capabilities.vocab_size,
            engine.device,
            raw=request.logprobs == "raw",
            support=request.return_support,
            top=request.top_logprobs,
        )
        limits = answer_limits(request, engine.capabilities.max_context).cpu()[own]
        self._ending = AnswerEnding(request.sampling, request.stop_ids, limits, engine.tokenizer, prompts)
        self.rows = [
            _Row(engine, row, request.request_ids[row], ids) for row, ids in zip(numbers, prompts.tolist(), strict=True)
        ]
        self._answers = {row: _Answer() for row in numbers}
        self.outcomes: dict[int, RowAnswer | RowFailure] = {}
        self.errors: list[BaseException] = []

    def advance(self, logits: Tensor) -> None:
        drawn = self._sampler(logits, read=True)
        assert drawn.read is not None
        ids, logprobs = drawn.read
        ended = self._ending(ids)
        kept = [] if drawn.kept is None else drawn.kept.ids.split(drawn.kept.counts.tolist())
        for place, (row, token, logprob) in enumerate(zip(self.rows, ids, logprobs, strict=True)):
            answer = self._answers[row.number]
            if math.isnan(logprob):
                self._end(row, self._failure(row))
                continue
            row.ids.append(token)
            answer.ids.append(token)
            answer.logprobs.append(logprob)
            if drawn.kept is not None:
                answer.kept.append(kept[place].tolist())
                answer.mass.append(float(drawn.kept.log_mass[place]))
            if drawn.top is not None:
                one = slice(place, place + 1)
                answer.top.append(TopIds(drawn.top.ids[one], drawn.top.logprobs[one], drawn.top.tail[one]))
            if self._request.on_tokens is not None:
                self._request.on_tokens(TokenChunk(row=row.number, ids=[token], logprobs=[logprob]))
            if place in ended:
                self._end(row, answer.row("stop" if ended[place] else "length", self._request))
        self._go_on()

    def abort(self, names: Collection[str]) -> None:
        for row in self.rows:
            if row.name in names:
                self._end(row, self._answers[row.number].row("abort", self._request))
        self._go_on()

    def _failure(self, row: _Row) -> RowFailure:
        if row.error is None:
            return RowFailure(NOT_NUMBERS)
        self.errors.append(row.error)
        return RowFailure(described(row.error))

    def _end(self, row: _Row, outcome: RowAnswer | RowFailure) -> None:
        row.forget()
        self.outcomes[row.number] = outcome
        if self._request.on_answer is not None and isinstance(outcome, RowAnswer):
            self._request.on_answer(row.number, len(outcome.ids))

    def _go_on(self) -> None:
        """Go on with the rows that have not ended. After the last one, set the result."""
        left = [place for place, row in enumerate(self.rows) if row.number not in self.outcomes]
        if 0 < len(left) < len(self.rows):
            places = torch.tensor(left)
            self._sampler.keep(places)
            self._ending.keep(places)
        self.rows = [self.rows[place] for place in left]
        if not self.rows:
            self.future.set_result(self)


@dataclass
class _Answer:
    """What was sampled of a row so far; see `RowAnswer`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    top: list[TopIds] = field(default_factory=list)

    def row(self, finish_reason: str, request: GenerateRequest) -> RowAnswer:
        top = TopIds.cat(self.top, request.top_logprobs) if request.top_logprobs else None
        return RowAnswer(self.ids, self.logprobs, finish_reason, self.kept, self.mass, top)


class _Scoring(_Call):
    """A call of `score_logprobs`.

    If the author gives the logits of a whole sequence, each step reads a sequence. Otherwise its rows grow by the ids
    that are given, together with the answers of other calls.
    """

    def __init__(self, request: ScoreRequest, engine: LogitsEngine) -> None:
        super().__init__()
        self.wants_logits = type(engine).sequence_logits is LogitsEngine.sequence_logits
        self._request, self._engine = request, engine
        self._scored = scored_positions(request)
        self._sequences = request.sequences.to("cpu")
        self._ids: list[list[int]] = self._sequences.tolist()
        self._starts: list[int] = request.score_from.clamp_min(1).tolist()
        self._parts: list[ScoredTokens] = []
        self._failed: dict[int, BaseException] = {}
        self.rows = [
            _Row(engine, row, name, self._ids[row][: start if self.wants_logits else -1])
            for row, (name, start) in enumerate(zip(request.request_ids, self._starts, strict=True))
            if start < len(self._ids[row])
        ]
        self._asked = len(self.rows)
        self._go_on()

    def advance(self, logits: Tensor) -> None:
        if self.wants_logits:
            rows = self.rows
            self._score(logits, [(row.number, len(row.ids)) for row in rows])
            for row in rows:
                if row.error is not None:
                    self._failed[row.number] = row.error
                row.ids.append(self._ids[row.number][len(row.ids)])
                if row.error is not None or len(row.ids) == len(self._ids[row.number]):
                    row.forget()
                    self.rows = [each for each in self.rows if each is not row]
        else:
            row = self.rows.pop(0)
            start, end = self._starts[row.number], len(row.ids) + 1
            try:
                found = self._engine.sequence_logits(row.ids, start - 1)
                made = _checked(found, end - start, self._engine)
            except Exception as error:
                self._failed[row.number] = error
            else:
                self._score(made, [(row.number, position) for position in range(start, end)])
        self._go_on()

    def abort(self, names: Collection[str]) -> None:
        for row in self.rows:
            if row.name in names:
                row.forget()
        self.rows = [row for row in self.rows if row.name not in names]
        self._go_on()

    def _score(self, logits: Tensor, places: Sequence[tuple[int, int]]) -> None:
        """Score the ids at some (row, position), given the logits that predict them."""
        offsets = self._sequences.offsets
        index = torch.tensor([int(offsets[row]) + position for row, position in places])
        query = TokenQuery.of(self._request, self._sequences.values[index], index)
        scores = scores_of_logits(logits, query.to(logits.device))
        device = self._request.device or self._request.sequences.values.device
        self._parts.append(ScoredTokens(index, scores).to(device))

    def _go_on(self) -> None:
        """Set the result if no row goes on."""
        if self.rows:
            return
        if self._failed and len(self._failed) == self._asked:
            self.future.set_exception(next(iter(self._failed.values())))
            return
        failed = {row: described(error) for row, error in self._failed.items()}
        size = self._engine.capabilities.vocab_size
        self.future.set_result(scoring_result(self._request, self._scored, self._parts, size, failed))


class _Loop:
    """Moves all calls on, step by step, on a thread of its own. Only that thread changes calls."""

    def __init__(self, engine: LogitsEngine) -> None:
        self._engine = engine
        self._calls: list[_Call] = []
        self._step_is_due = False
        # Its queue holds what is to be done between two steps and, behind that, the next step.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(engine).__name__)

    def run(self, calls: Sequence[_Call], timeout: float | None) -> list[Any]:
        """Return the results of calls when all have one.

        Raises:
            TimeoutError: not in time. The calls have left then.
        """
        deadline = Deadline(timeout)
        self.tell(self.join, calls)
        try:
            for call in calls:
                while not done_within(call.future, deadline.left()):
                    pass
            return [call.future.result() for call in calls]
        except BaseException:
            self.tell(self._leave, calls)
            raise

    def tell(self, do: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have the thread do something between two steps."""
        return self._thread.submit(do, *arguments)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make no step while this thread uses the engine."""
        begun, done = Future[None](), Future[None]()

        def wait() -> None:
            begun.set_result(None)
            done.result()

        self.tell(wait)
        try:
            done_within(begun)
            yield
        finally:
            done.set_result(None)

    def close(self) -> bool:
        """End the calls under way and the thread. Return False if the step under way does not end."""
        ended = done_within(self.tell(self._end, EngineError("the engine was closed", usable=False)), _PATIENCE)
        self._thread.shutdown(wait=ended)
        return ended

    # On the thread ----------------------------------------------------------------------------------------------------

    def join(self, calls: Sequence[_Call]) -> None:
        self._calls += calls
        self._go_on()

    def abort(self, names: Collection[str]) -> None:
        for call in self._calls:
            self._guarded(call, call.abort, names)
        self._go_on()

    def _leave(self, calls: Sequence[_Call]) -> None:
        for call in calls:
            call.leave()
        self._calls = [each for each in self._calls if each not in calls]

    def _end(self, error: BaseException) -> None:
        for call in self._calls:
            if not call.future.done():
                call.fail(error)
        self._calls = []

    def _go_on(self) -> None:
        self._calls = [call for call in self._calls if not call.future.done()]
        if self._calls and not self._step_is_due:
            self._step_is_due = True
            self.tell(self._step)

    def _step(self) -> None:
        self._step_is_due = False
        calls = self._under_way()
        counts = [len(call.rows) if call.wants_logits else 0 for call in calls]
        try:
            with torch.no_grad():
                logits = self._logits([row for call in calls if call.wants_logits for row in call.rows])
                for call, some in zip(calls, logits.split(counts), strict=True):
                    self._guarded(call, call.advance, some)
            self._go_on()
        except BaseException as error:
            # Without a step, their callers would wait for ever.
            self._end(error)

    def _under_way(self) -> list[_Call]:
        """Return the calls that go on: the oldest ones, the first in any case."""
        most = self._engine.max_under_way
        if most is None:
            return self._calls
        fitting = sum(rows <= most for rows in accumulate(len(call.rows) for call in self._calls))
        return self._calls[: max(1, fitting)]

    def _guarded(self, call: _Call, do: Callable[..., None], *arguments: Any) -> None:
        """Do something for a call, whose neighbours go on if it fails."""
        try:
            do(*arguments)
        except BaseException as error:
            call.fail(error)

    def _logits(self, rows: Sequence[_Row]) -> Tensor:
        """Return float32[rows, V], with NaN for a row that failed, whose `error` says why."""
        size = self._engine.max_rows or max(1, len(rows))
        parts = [self._read(rows[at : at + size]) for at in range(0, len(rows), size)]
        return torch.cat(parts) if parts else torch.empty(0, self._engine.capabilities.vocab_size)

    def _read(self, rows: Sequence[_Row]) -> Tensor:
        try:
            found = self._engine.logits([row.ids for row in rows], [row.cache for row in rows])
            return _checked(found, len(rows), self._engine)
        except BaseException as error:
            # What is in the caches may be of a step that was half done.
            for row in rows:
                row.forget()
            if len(rows) > 1:
                return torch.cat([self._read([row]) for row in rows])
            rows[0].error = error
            return torch.full((1, self._engine.capabilities.vocab_size), math.nan, device=self._engine.device)


def _checked(found: Any, count: int, engine: LogitsEngine) -> Tensor:
    """Return what the author's code returned as float32[count, V] on the engine's device."""
    logits = found if isinstance(found, Tensor) else torch.tensor(found)
    expected = (count, engine.capabilities.vocab_size)
    if tuple(logits.shape) != expected:
        raise EngineError(f"expected logits of shape {expected}, got {tuple(logits.shape)}")
    return logits.to(engine.device, torch.float32)
