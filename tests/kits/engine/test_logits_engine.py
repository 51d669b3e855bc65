"""`LogitsEngine`: the promises of the kit, calls that share steps, and rows that fail alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corelm import Backend
from corelm.backend import futures
from corelm.errors import BackendTimeoutError, EngineError
from corelm.spec import (
    AbortRequest,
    CloseRequest,
    Deadline,
    GenerateResult,
    WeightUpdate,
)
from corelm_engine_kit import LogitsEngine, refuse_weights, shape_problems, shapes_of
from corelm_testing.toy import ByteTokenizer
from helpers.batching_fakes import wait_until
from helpers.insides import calls_in_steps
from helpers.requests import generation
from helpers.toy_conformance import TABLE, ToyConformance

SIZE = len(TABLE)
in_thread = partial(futures.in_thread, name="caller")


class Table(LogitsEngine):
    """The next token depends on the last one: row t of the table holds the logits after token t."""

    def __init__(self, **options: Any) -> None:
        self.table = nn.Parameter(TABLE.clone())
        super().__init__(ByteTokenizer(), max_context=512, **options)

    def logits(self, rows: Sequence[list[int]], caches: Sequence[dict[str, Any]]) -> Tensor:
        return self.table[[row[-1] for row in rows]]


class WholeSequences(Table):
    def __init__(self) -> None:
        super().__init__(gradients=True, update_weights=True)

    def sequence_logits(self, ids: list[int], first: int) -> Tensor:
        return self.table[ids[first:]]

    def load_weights(self, update: WeightUpdate) -> None:
        if not update.by_owner:
            state = dict(update.state_dict or {})
            refuse_weights(shape_problems(shapes_of(state), {"table": (SIZE, SIZE)}), "state_dict")
            self.table.data = state["table"].clone()


def opened(engine: LogitsEngine) -> Backend:
    return Backend.from_plugin(engine, name="table", model_name="table")


class TestWholeSequences(ToyConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return lambda: opened(WholeSequences())


def test_an_author_may_use_any_private_name() -> None:
    engine = Table()
    private = {name for name in {*vars(LogitsEngine), *vars(engine)} if name.startswith("_")}
    assert not {name for name in private if not name.startswith(("__", "_LogitsEngine__"))}


# Steps ----------------------------------------------------------------------------------------------------------------


class Stepwise(Table):
    """Makes a step when it is told to, and notes how many rows each step had."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.steps: list[int] = []

    def logits(self, rows: Sequence[list[int]], caches: Sequence[dict[str, Any]]) -> Tensor:
        self.begun.release()
        self.may_end.acquire()
        self.steps.append(len(rows))
        return super().logits(rows, caches)

    def step(self) -> None:
        """Let the step end that has begun, and wait until the next one begins."""
        self.may_end.release()
        assert self.begun.acquire(timeout=60)

    def submit(self, count: int, **sampling: Any) -> Future[GenerateResult]:
        request = generation([[5]] * count, ignore_eos=True, **sampling, seeds=torch.arange(count))
        calls = len(calls_in_steps(self))
        future = in_thread(lambda: self.generate(request))
        wait_until(lambda: len(calls_in_steps(self)) > calls or future.done())
        return future


@pytest.fixture
def stepwise() -> Iterator[Stepwise]:
    engine = Stepwise()
    yield engine
    engine.may_end.release(10_000)
    with suppress(RuntimeError):  # it is closed
        engine.abort(AbortRequest(request_ids=tuple(map(str, range(9)))))


def test_a_short_call_waits_at_most_three_steps_behind_eight_long_ones(stepwise: Stepwise) -> None:
    long = [stepwise.submit(1, max_new_tokens=400, temperature=0.5 + number / 10) for number in range(8)]
    assert stepwise.begun.acquire(timeout=60)
    for _ in range(5):
        stepwise.step()
    short = stepwise.submit(1, max_new_tokens=2, top_k=7)
    # The step that had begun, and one for each of its tokens.
    for _ in range(3):
        stepwise.step()
    assert len(short.result(60).ids.values) == 2 and stepwise.steps[-3:] == [8, 9, 9]
    assert not any(call.done() for call in long)


def test_answers_do_not_depend_on_who_shares_their_steps(stepwise: Stepwise) -> None:
    stepwise.may_end.release(10_000)
    alone = stepwise.submit(3, max_new_tokens=20, top_p=0.8).result(60)
    calls = [stepwise.submit(3, max_new_tokens=20, top_p=0.8), stepwise.submit(2, max_new_tokens=9, temperature=0.0)]
    assert calls[0].result(60).ids.tolist() == alone.ids.tolist()
    assert max(stepwise.steps) >= 3 and calls[1].result(60).ids.lengths.tolist() == [9, 9]


class OneAtATime(Stepwise):
    max_under_way = 1


@pytest.fixture
def in_turn() -> Iterator[OneAtATime]:
    engine = OneAtATime()
    yield engine
    engine.may_end.release(10_000)


def test_rows_wait_for_those_before_them(in_turn: OneAtATime) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 0.7, "ignore_eos": True, "seed": 3}
    prompts, scored = [[5, 6], [7], [8, 9]], [[5, 6, 7], [3, 4]]
    in_turn.may_end.release(10_000)
    with opened(Table()) as together, opened(in_turn) as backend:
        expected, found = (each.generate(prompts, sampling) for each in (together, backend))
        assert found.ids.tolist() == expected.ids.tolist() and in_turn.steps == [1] * 15
        assert found.logprobs is not None and expected.logprobs is not None
        assert found.logprobs.values.equal(expected.logprobs.values)
        expected_scores, scores = (each.score_logprobs(scored).logprobs for each in (together, backend))
        assert scores.values.equal(expected_scores.values) and {*in_turn.steps} == {1}


def test_a_call_that_waits_for_room_can_be_aborted_and_times_out(in_turn: OneAtATime) -> None:
    first = in_turn.submit(1, max_new_tokens=3)
    assert in_turn.begun.acquire(timeout=60)
    aborted, late = in_turn.submit(1, max_new_tokens=400), in_turn.submit(1, max_new_tokens=400)
    calls = calls_in_steps(in_turn)
    calls[1].abort(("0",))
    calls[2].deadline = Deadline(0.0)
    in_turn.step()
    assert aborted.result(60).finish_reasons == ("abort",) and isinstance(late.exception(60), TimeoutError)
    in_turn.may_end.release(2)
    assert len(first.result(60).ids.values) == 3


class TwoAtATime(Stepwise):
    max_under_way = 2


def test_many_rows_that_wait_for_room_are_not_overtaken_by_few() -> None:
    engine = TwoAtATime()
    first = engine.submit(1, max_new_tokens=4)
    assert engine.begun.acquire(timeout=60)
    many = engine.submit(2, max_new_tokens=3)
    engine.step()
    few = engine.submit(1, max_new_tokens=2)
    engine.may_end.release(10_000)
    assert [len(call.result(60).ids.values) for call in (first, many, few)] == [4, 6, 2]
    assert engine.steps == [1] * 4 + [2] * 3 + [1] * 2


class Autocast(Stepwise):
    """Notes which ids it read with autocast, and which without."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[bool, set[int]] = {False: set(), True: set()}

    def logits(self, rows: Sequence[list[int]], caches: Sequence[dict[str, Any]]) -> Tensor:
        self.read[torch.is_autocast_enabled("cpu")].update(row[0] for row in rows)
        return super().logits(rows, caches)


def test_a_call_has_the_autocast_of_its_own_caller_only() -> None:
    engine = Autocast()
    with opened(engine) as backend:

        def autocasting() -> GenerateResult:
            with torch.autocast("cpu", torch.bfloat16):
                return backend.generate([[7]], {"max_new_tokens": 3, "ignore_eos": True})

        first = in_thread(autocasting)
        assert engine.begun.acquire(timeout=60)
        other = engine.submit(1, max_new_tokens=6)
        engine.may_end.release(10_000)
        assert len(first.result(60).ids.values) == 3 and len(other.result(60).ids.values) == 6
    assert engine.read == {True: {7}, False: {5}} and {*engine.steps} == {1}


# Failures -------------------------------------------------------------------------------------------------------------


class Failing(Table):
    """Fails if the id 7 is in a row."""

    def logits(self, rows: Sequence[list[int]], caches: Sequence[dict[str, Any]]) -> Tensor:
        if any(7 in row for row in rows):
            raise RuntimeError("seven")
        return super().logits(rows, caches)


def test_a_row_fails_alone() -> None:
    with opened(Failing()) as backend:
        sampling = {"max_new_tokens": 3, "stop_token_ids": [7], "seed": 1}
        batch = backend.generate([[5], [7], [6]], sampling, on_error="skip")
        assert batch.finish_reasons[1] == "error" and "seven" in (batch.errors or ())[1]
        assert batch.finish_reasons[0] != "error" != batch.finish_reasons[2]
        scores = backend.score_logprobs([[5, 6], [7, 6], [5, 4, 7, 3]], on_error="skip")
        assert scores.scored.tolist() == [[False, True], [False, False], [False] * 4]
        assert [bool(error) for error in scores.errors or ()] == [False, True, True]


def test_a_call_of_which_every_row_fails_gets_the_error() -> None:
    with opened(Failing()) as backend:
        for call in (lambda: backend.generate([[7]]), lambda: backend.score_logprobs([[7, 8]])):
            with pytest.raises(EngineError, match="seven") as caught:
                call()
            assert isinstance(caught.value.__cause__, RuntimeError)


class Narrow(Table):
    def logits(self, rows: Sequence[list[int]], caches: Sequence[dict[str, Any]]) -> Tensor:
        return super().logits(rows, caches)[:, 1:]


def test_logits_of_another_shape_are_refused() -> None:
    with opened(Narrow()) as backend, pytest.raises(EngineError, match=rf"\(1, {SIZE}\).*\(1, {SIZE - 1}\)"):
        backend.generate([[5]])


class Numberless(Table):
    def logits(self, rows: Sequence[list[int]], caches: Sequence[dict[str, Any]]) -> Tensor:
        found = super().logits(rows, caches)
        found[torch.tensor([row[0] == 7 for row in rows])] = torch.nan
        return found


def test_logits_that_are_no_numbers_are_an_error_of_their_row() -> None:
    with opened(Numberless()) as backend:
        sampling = {"max_new_tokens": 2, "seed": 1, "ignore_eos": True}
        batch = backend.generate([[5], [7]], sampling, on_error="skip")
        assert batch.finish_reasons == ("length", "error") and "NaN" in (batch.errors or ())[1]


# Caches ---------------------------------------------------------------------------------------------------------------


class Caching(Table):
    """Reads each id once, and notes which caches were released."""

    max_rows = 2

    def __init__(self) -> None:
        super().__init__()
        self.widest = 0
        self.released: list[int] = []

    def logits(self, rows: Sequence[list[int]], caches: Sequence[dict[str, Any]]) -> Tensor:
        self.widest = max(self.widest, len(rows))
        for row, cache in zip(rows, caches, strict=True):
            new = row[cache.get("read", 0) :]
            assert not cache or len(new) == 1
            cache["read"] = len(row)
        return super().logits(rows, caches)

    def release(self, cache: dict[str, Any]) -> None:
        self.released.append(cache["read"])


def test_a_cache_lives_as_long_as_its_row() -> None:
    engine = Caching()
    with opened(engine) as backend:
        backend.generate([[5, 6], [5], [4]], {"max_new_tokens": 3, "ignore_eos": True})
        assert sorted(engine.released) == [3, 3, 4] and engine.widest == 2
        backend.score_logprobs([[5, 6, 7], [8, 9]])
        assert sorted(engine.released) == [1, 2, 3, 3, 4]


# Ends -----------------------------------------------------------------------------------------------------------------


def test_a_call_that_times_out_leaves_and_the_others_go_on(stepwise: Stepwise) -> None:
    other = stepwise.submit(1, max_new_tokens=3)
    assert stepwise.begun.acquire(timeout=60)
    with opened(stepwise) as backend:
        with pytest.raises(BackendTimeoutError):
            backend.generate([[5]] * 2, {"max_new_tokens": 400}, timeout=0.05)
        for _ in range(2):
            stepwise.step()
        stepwise.may_end.release(1)
        assert len(other.result(60).ids.values) == 3 and stepwise.steps == [1, 1, 1]


def test_closing_ends_the_calls_under_way(stepwise: Stepwise) -> None:
    call = stepwise.submit(1, max_new_tokens=400)
    assert stepwise.begun.acquire(timeout=60)
    stepwise.may_end.release(10_000)
    assert stepwise.close(CloseRequest())
    assert call.result(60).finish_reasons == ("abort",) and len(call.result().ids.values) < 400
    with pytest.raises(EngineError, match="closed"):
        stepwise.submit(1, max_new_tokens=1).result(60)
