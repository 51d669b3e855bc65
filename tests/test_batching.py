"""`DynamicBatcher` on an engine that waits for permits: shared calls, own answers, own errors, and every way to end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

import pytest
import torch

from batching_fakes import LONG, POISON, Clock, Held, answer, batcher, can, rows_of, until
from corelm import Backend
from corelm.batching import DynamicBatcher, QueueFullError
from corelm.errors import (
    BackendClosedError,
    BackendTimeoutError,
    CapabilityError,
    EngineError,
    InvalidRequestError,
)
from corelm.sampling import answer_seeds
from fakes import SHORT

SEEDED = {**SHORT, "seed": 7}


def ids(result: Future | object) -> list[list[int]]:
    batch = result.result(LONG) if isinstance(result, Future) else result
    return batch.ids.tolist()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def hold_one(engine, made):
    """A request that is in the engine and stays there, so that what comes next has to queue."""
    first = made.submit_generate([[3]], SEEDED)
    engine.wait_for_calls(1)
    return first


# Sharing -------------------------------------------------------------------------------------------------------------


def test_requests_with_equal_parameters_share_a_call_and_each_gets_its_own_answer():
    engine = Held(permits=0)
    with batcher(engine) as made:
        first = hold_one(engine, made)
        others = [made.submit_generate([[3, n], [4, n]], {**SHORT, "seed": n}) for n in range(5)]
        engine.release(2)
        for n, future in enumerate(others):
            seeds = answer_seeds(n, range(2)).tolist()
            assert ids(future) == [answer([3 + row, n], seeds[row], 2, 1.0) for row in range(2)]
        assert ids(first) == [answer([3], int(answer_seeds(7, [0])), 2, 1.0)]
    assert [len(call.prompts) for call in engine.calls] == [1, 10]
    assert engine.calls[1].sampling.seed is None and len({*engine.calls[1].request_ids}) == 10


def test_samples_stay_with_their_prompt():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[n], [n + 1]], {**SEEDED, "num_samples": 3}) for n in (4, 8)]
        engine.free()
        seeds = answer_seeds(7, range(2), 3).tolist()
        for n, future in zip((4, 8), futures, strict=True):
            assert ids(future) == [answer([n + i // 3], seeds[i], 2, 1.0) for i in range(6)]
    assert len(engine.calls) == 2


@pytest.mark.parametrize(
    "other",
    [{"temperature": 0.5}, {"max_new_tokens": 3}, {"stop": "7"}, {"stop_token_ids": [9]}, {"ignore_eos": True}],
)
def test_another_callers_parameters_are_never_applied(other):
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        one, two = (made.submit_generate([[5]], {**SEEDED, **more}) for more in ({}, other))
        engine.free()
        seed = int(answer_seeds(7, [0]))
        assert ids(one) == [answer([5], seed, 2, 1.0)]
        assert ids(two) == [answer([5], seed, other.get("max_new_tokens", 2), other.get("temperature", 1.0))]
    assert [len(call.prompts) for call in engine.calls] == [1, 1, 1]


def test_engine_arguments_are_nobody_elses():
    engine = Held(permits=0, sampling={"engine_kwargs": None})
    with batcher(engine) as made:
        hold_one(engine, made)
        # Equal for Python, and two things for an engine.
        futures = [made.submit_generate([[5]], {**SEEDED, "engine_kwargs": {"x": x}}) for x in (1, True)]
        engine.free()
        wait(futures, LONG)
    assert [call.sampling.engine_kwargs for call in engine.calls] == [{}, {"x": 1}, {"x": True}]


def test_log_probs_wanted_and_not_wanted_are_two_calls_and_both_are_labelled():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = {mode: made.submit_generate([[5]], SEEDED, logprobs=mode) for mode in ("none", "raw", "processed")}
        engine.free()
        batches = {mode: future.result(LONG) for mode, future in futures.items()}
    assert batches["none"].logprobs is None
    assert batches["raw"].mode == "raw" and batches["processed"].mode == "processed"
    assert len(engine.calls) == 3, "at temperature 1 raw and processed are the same numbers, and share a call"


def test_scores_share_a_call_too():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        one = made.submit_score_logprobs([[1, 2, 3], [4]], score_from=2)
        two = made.submit_score_logprobs([[5, 6]])
        engine.free()
        assert one.result(LONG).logprobs.tolist() == [[0.0, 0.0, -3.0], [0.0]]
        assert one.result().scored.tolist() == [[False, False, True], [False]]
        assert two.result(LONG).logprobs.tolist() == [[0.0, -6.0]]
    assert rows_of(engine.calls[1]) == [[1, 2, 3], [4], [5, 6]]


def test_scores_at_different_temperatures_are_different_calls():
    engine = Held(permits=0, score_temperature=True)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = {t: made.submit_score_logprobs([[5, 6]], temperature=t) for t in (1.0, 2.0, 0.5)}
        engine.free()
        for temperature, future in futures.items():
            batch = future.result(LONG)
            assert batch.temperature == temperature and batch.logprobs.tolist() == [[0.0, -6.0 / temperature]]
    assert len(engine.calls) == 4


def test_a_result_owns_its_storage_and_a_request_is_a_copy():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        mine = torch.tensor([[5, 6]])
        futures = [made.submit_generate(mine, SEEDED), made.submit_generate([[7]], SEEDED)]
        mine.fill_(9)
        engine.free()
        one, two = (future.result(LONG) for future in futures)
    assert rows_of(engine.calls[1]) == [[5, 6], [7]]
    assert one.ids.values.untyped_storage().data_ptr() != two.ids.values.untyped_storage().data_ptr()
    assert not one.ids.values.is_inference()


def test_it_has_the_facade_of_its_backend():
    engine = Held()
    with batcher(engine) as made:
        assert isinstance(made, Backend) and made.name == "held" and made.capabilities is engine.capabilities
        assert made.tokenize(["3a"]).ids.tolist() == [[3, 10]] and made.detokenize([[3, 10]]) == ["3a"]
        batch = made.generate([[1]], SHORT)
        assert made.provenance(batch).backend == "held" and made.health() and made.pad_id == 0
        assert made.generate([], SHORT).finish_reasons == ()
        with pytest.raises(InvalidRequestError, match="not batched"):
            DynamicBatcher(made)
    assert made.closed and made.backend.closed and not made.health()


def test_many_threads_with_little_time_each():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with batcher(Held(), max_batch_size=7) as made, ThreadPoolExecutor(16) as pool:
            asked = [([3 + n % 9, n % 5], n, 1.0 + n % 3 / 10) for n in range(400)]

            def ask(one):
                prompt, seed, temperature = one
                return ids(made.generate([prompt], {**SHORT, "seed": seed, "temperature": temperature}))

            for (prompt, seed, temperature), got in zip(asked, pool.map(ask, asked), strict=True):
                assert got == [answer(prompt, int(answer_seeds(seed, [0])), 2, temperature)]
    finally:
        sys.setswitchinterval(before)


# One bad item --------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_before_it_is_queued():
    engine = Held(permits=0)
    with batcher(engine) as made:
        for sampling, prompts in ((SHORT, [[99]]), (SHORT, [[]]), (SHORT, [[1] * 12]), ({"top_p": 7}, [[1]])):
            with pytest.raises(InvalidRequestError):
                made.submit_generate(prompts, sampling)
        with pytest.raises(CapabilityError):
            made.submit_generate([[1]], {"top_k": 3})
        assert made.state().queued == 0 and not engine.calls


def test_what_fails_in_the_engine_fails_alone_and_the_rest_is_served():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[POISON if n == 5 else n + 3]], SEEDED) for n in range(9)]
        engine.free()
        for n, future in enumerate(futures):
            if n == 5:
                error = future.exception(LONG)
                assert isinstance(error, EngineError) and "poisoned" in str(error) and error.__cause__ is engine.error
            else:
                assert ids(future) == [answer([n + 3], int(answer_seeds(7, [0])), 2, 1.0)]
        assert ids(made.generate([[5]], SEEDED)), "later calls are untouched"
    # One call for all, then halves: 9 -> 4 + 5 -> 2 + 3 -> 1 + 2.
    assert [len(call.prompts) for call in engine.calls[1:-1]] == [9, 4, 5, 2, 1, 1, 3] or len(engine.calls) < 10


def test_skipped_rows_are_put_back_and_failures_of_single_rows_are_their_requests_own():
    class Rowwise(Held):
        def generate(self, request):  # type: ignore[override]
            batch = super().generate(request)
            bad = [row[0] == 14 for row in request.prompts.tolist()]
            return type(batch)(
                ids=batch.ids,
                logprobs=batch.logprobs,
                finish_reasons=tuple("error" if b else r for b, r in zip(bad, batch.finish_reasons, strict=True)),
                errors=tuple("no fourteen" if b else "" for b in bad),
            )

    Rowwise.generate.corelm_impl = Held.generate.corelm_impl  # type: ignore[attr-defined]
    engine = Rowwise(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        fine = made.submit_generate([[5]], SEEDED)
        strict = made.submit_generate([[4], [14]], SEEDED)
        lenient = made.submit_generate([[99], [14], [4]], SEEDED, on_error="skip")
        engine.free()
        assert ids(fine) and fine.result().finish_reasons == ("length",)
        error = strict.exception(LONG)
        assert isinstance(error, EngineError) and error.problems == {1: "no fourteen"}
        batch = lenient.result(LONG)
        assert batch.finish_reasons == ("error", "error", "length") and batch.ids.lengths.tolist() == [0, 2, 2]
        assert "outside the vocabulary" in batch.errors[0] and batch.errors[1:] == ("no fourteen", "")
    assert len(engine.calls) == 2


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (EngineError("gone", usable=False), 1),
        (BackendTimeoutError("slow"), 1),
        (CapabilityError("cannot"), 1),
        (EngineError("who knows"), 2 * 8 - 1),
    ],
)
def test_an_error_that_is_everybodys_is_not_asked_for_again(error, calls):
    engine = Held(permits=0, error=error)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[POISON]], SEEDED) for _ in range(8)]
        engine.free()
        raised = [future.exception(LONG) for future in futures]
        assert all(type(each) is type(error) and str(error) in str(each) for each in raised)
        assert len({id(each) for each in raised}) == 8, "each caller has one of its own to raise"
    assert len(engine.calls) == 1 + calls


def test_an_engine_that_is_not_healthy_any_more_is_not_asked_again():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[POISON]], SEEDED) for _ in range(8)]
        engine.alive = False
        engine.free()
        assert all(isinstance(future.exception(LONG), EngineError) for future in futures)
    assert len(engine.calls) == 2


def test_who_left_meanwhile_is_not_asked_for_again():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        poisoned, gone, kept = (made.submit_generate([[n]], SEEDED) for n in (POISON, 4, 5))
        engine.release()
        engine.wait_for_calls(2)
        assert gone.cancel()
        engine.free()
        assert isinstance(poisoned.exception(LONG), EngineError) and ids(kept)
    assert [rows_of(call) for call in engine.calls[2:]] == [[[POISON]], [[5]]]


def test_an_engine_that_dies_in_the_middle_fails_the_rest():
    class Dying(Held):
        def _pass(self, request):
            try:
                return super()._pass(request)
            except RuntimeError:
                if len(rows_of(request)) == 1:
                    raise EngineError("the process is gone", usable=False) from None
                raise

    engine = Dying(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[n]], SEEDED) for n in (POISON, 4, 5, 6)]
        engine.free()
        assert all("gone" in str(future.exception(LONG)) for future in futures)
    assert [len(call.prompts) for call in engine.calls] == [1, 4, 2, 1]


def test_an_answer_for_fewer_rows_than_asked_is_refused_whoever_asked():
    class Short(Held):
        def generate(self, request):  # type: ignore[override]
            batch = super().generate(request)
            return type(batch)(ids=batch.ids.select([0]), logprobs=batch.logprobs.select([0]), finish_reasons=("stop",))

    Short.generate.corelm_impl = Held.generate.corelm_impl  # type: ignore[attr-defined]
    engine = Short(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        one, two = (made.submit_generate([[n]], SEEDED) for n in (4, 5))
        pair = made.submit_generate([[6], [7]], SEEDED)
        engine.free()
        assert ids(one) == [answer([4], int(answer_seeds(7, [0])), 2, 1.0)]
        assert ids(two) == [answer([5], int(answer_seeds(7, [0])), 2, 1.0)]
        assert "1 rows for 2 answers" in str(pair.exception(LONG))


def test_requests_that_name_their_rows_alike_do_not_share():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[n]], SEEDED, request_ids=["mine"]) for n in (4, 5)]
        engine.free()
        assert [ids(future)[0] for future in futures] == [
            answer([n], int(answer_seeds(7, [0])), 2, 1.0) for n in (4, 5)
        ]


# When ----------------------------------------------------------------------------------------------------------------


def test_a_batch_starts_once_enough_rows_are_there():
    engine, clock = Held(), Clock()
    with batcher(engine, min_batch_size=3, batching_timeout=60.0, clock=clock) as made:
        futures = [made.submit_generate([[n]], SEEDED) for n in (3, 4)]
        assert made.state().queued == 2 and not engine.calls
        futures.append(made.submit_generate([[5]], SEEDED))
        wait(futures, LONG)
    assert [len(call.prompts) for call in engine.calls] == [3]


def test_the_oldest_requests_timeout_sends_the_batch_as_it_is():
    engine, clock = Held(), Clock()
    with batcher(engine, min_batch_size=3, batching_timeout=60.0, clock=clock) as made:
        first = made.submit_generate([[3]], SEEDED)
        clock.now += 59.0
        # Whatever comes in makes the thread look at the clock.
        other = made.submit_generate([[4]], {**SEEDED, "temperature": 0.5})
        assert made.state().oldest_wait == 59.0 and not engine.calls
        clock.now += 1.0
        second = made.submit_generate([[5]], {**SEEDED, "temperature": 0.7})
        assert ids(first) == [answer([3], int(answer_seeds(7, [0])), 2, 1.0)]
        assert not other.done() and not second.done()
        assert made.state().queued == 2
        made.cleanup(flush=True)
        assert other.done() and second.done()


def test_a_real_clock_sends_a_lone_request_after_its_timeout():
    with batcher(Held(), min_batch_size=9, batching_timeout=0.01) as made:
        assert ids(made.generate([[3]], SEEDED))


def test_a_clock_that_stands_still_holds_up_nobody_who_has_enough():
    engine, clock = Held(permits=0), Clock()
    with batcher(engine, clock=clock) as made:
        first = hold_one(engine, made)
        second = made.submit_generate([[4]], SEEDED)
        # A call of a minute: the first caller would be waited for, were it not for the second's own time.
        clock.now += 60.0
        engine.free()
        assert ids(first) and ids(second)


def test_the_time_of_a_request_is_over_in_the_queue_while_the_engine_works():
    engine = Held(permits=0)
    with batcher(engine) as made:
        first = hold_one(engine, made)
        with pytest.raises(BackendTimeoutError):
            made.generate([[4]], SEEDED, timeout=0.01)
        with pytest.raises(BackendTimeoutError):
            made.score_logprobs([[4, 5]], grad=False, timeout=0.01)
        future = made.submit_generate([[4]], SEEDED, timeout=0.01)
        assert isinstance(future.exception(LONG), BackendTimeoutError)
        assert made.state().queued == 0 and not first.done()
        engine.free()
        assert ids(first)
    assert len(engine.calls) == 1


def test_a_request_whose_time_is_over_in_the_engine_leaves_its_company_alone():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        patient = made.submit_generate([[4]], SEEDED)
        hasty = made.submit_generate([[5]], SEEDED, timeout=0.2)
        engine.release()
        engine.wait_for_calls(2)
        assert isinstance(hasty.exception(LONG), BackendTimeoutError)
        assert not patient.done()
        engine.free()
        assert ids(patient)
    assert engine.calls[1].timeout is None and len(engine.calls[1].prompts) == 2


def test_the_engine_gets_the_time_of_the_one_that_has_most():
    engine, clock = Held(permits=0), Clock()
    with batcher(engine, clock=clock) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[4]], SEEDED, timeout=t) for t in (100.0, 300.0)]
        clock.now += 50.0
        engine.free()
        wait(futures, LONG)
    assert engine.calls[1].timeout == pytest.approx(250.0, abs=5.0)


# Leaving -------------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_is_not_asked_for():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        kept, dropped = (made.submit_generate([[n]], SEEDED) for n in (4, 5))
        assert dropped.cancel() and dropped.cancelled()
        assert made.state().queued == 1
        engine.free()
        assert ids(kept)
        assert wait([dropped], LONG).done
        with pytest.raises(CancelledError):
            dropped.result()
    assert rows_of(engine.calls[1]) == [[4]]


def test_a_cancelled_request_in_the_engine_is_aborted_there_by_name():
    engine = Held(permits=0, **can())
    with batcher(engine) as made:
        hold_one(engine, made)
        kept = made.submit_generate([[4]], SEEDED, request_ids=["kept"])
        dropped = made.submit_generate([[5]], SEEDED, request_ids=["dropped"])
        engine.release()
        engine.wait_for_calls(2)
        assert dropped.cancel()
        engine.wait_for(lambda: bool(engine.aborted))
        engine.free()
        assert ids(kept)
    assert engine.aborted == {"dropped"}


def test_a_cancelled_request_in_an_engine_that_cannot_abort_is_dropped_and_harms_nobody():
    engine = Held(permits=0)
    with batcher(engine) as made:
        first = hold_one(engine, made)
        assert first.cancel()
        second = made.submit_generate([[4]], SEEDED)
        engine.free()
        assert ids(second)


def test_abort_ends_what_is_named_in_the_queue_and_in_the_engine():
    engine = Held(permits=0, **can())
    with batcher(engine) as made:
        first = made.submit_generate([[3]], SEEDED, request_ids=["in"])
        engine.wait_for_calls(1)
        queued = made.submit_generate([[4], [5]], SEEDED, request_ids=["a", "b"])
        kept = made.submit_generate([[6]], SEEDED, request_ids=["c"])
        scored = made.submit_score_logprobs([[6, 7]], request_ids=["s"])
        made.abort(["in", "a", "b", "s"])
        for future, rows in ((first, 1), (queued, 2)):
            assert future.result(LONG).finish_reasons == ("abort",) * rows and ids(future) == [[]] * rows
        assert "aborted" in str(scored.exception(LONG))
        engine.free()
        assert ids(kept) != [[]]
    with batcher(Held()) as made, pytest.raises(CapabilityError):
        made.abort(["x"])


def test_a_full_queue_keeps_its_callers_waiting():
    engine = Held(permits=0)
    with batcher(engine, max_queue=2) as made, ThreadPoolExecutor(2) as pool:
        hold_one(engine, made)
        queued = [made.submit_generate([[n]], SEEDED) for n in (4, 5)]
        entering = pool.submit(made.submit_generate, [[6]], SEEDED)
        until(lambda: made.state().outside > 0)
        assert not entering.done() and made.state().queued == 3
        queued[0].cancel()
        third = entering.result(LONG)
        assert made.state().outside == 0
        engine.free()
        assert ids(third) and ids(queued[1])


def test_a_full_queue_refuses_if_it_is_told_to():
    engine = Held(permits=0)
    with batcher(engine, max_queue=1, on_full="raise") as made:
        hold_one(engine, made)
        queued = made.submit_generate([[4]], SEEDED)
        with pytest.raises(QueueFullError, match="max_queue") as error:
            made.generate([[5]], SEEDED)
        assert error.value.usable
        engine.free()
        assert ids(queued)


# Ending --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flush", [True, False])
def test_closing_leaves_no_future_pending_and_no_thread(flush):
    engine = Held(permits=0)
    made = DynamicBatcher(Backend(engine, "held"), min_batch_size=3, batching_timeout=60.0, max_queue=2)
    running = [made.submit_generate([[n], [n]], SEEDED) for n in (3, 4)]
    engine.wait_for_calls(1)
    with ThreadPoolExecutor(3) as pool:
        queued = [made.submit_generate([[n]], SEEDED, timeout=60.0) for n in (5, 6)]
        entering = pool.submit(made.submit_generate, [[7]], SEEDED)
        until(lambda: made.state().outside > 0)
        closing = pool.submit(made.close, flush=flush)
        until(lambda: made.state().closed)
        with pytest.raises(BackendClosedError):
            made.generate([[3]], SEEDED)
        engine.free()
        closing.result(LONG)
        queued.append(entering.result(LONG))
    assert all(ids(future) for future in running), "what was in the engine has its answer"
    for future in queued:
        assert future.done()
        assert ids(future) if flush else isinstance(future.exception(), BackendClosedError)
    assert made.closed and made.state().threads == 0
    made.close()


def test_closing_without_flush_aborts_what_runs_where_that_is_possible():
    engine = Held(permits=0, **can())
    made = DynamicBatcher(Backend(engine, "held"))
    running = hold_one(engine, made)
    made.close(flush=False)
    assert running.result().finish_reasons == ("abort",)


def test_cleanup_ends_the_threads_and_a_later_request_finds_a_new_one():
    engine = Held(permits=0)
    with batcher(engine) as made:
        first = hold_one(engine, made)
        queued = made.submit_generate([[4]], SEEDED)
        with ThreadPoolExecutor(1) as pool:
            cleaning = pool.submit(made.cleanup, flush=False)
            assert isinstance(queued.exception(LONG), BackendClosedError)
            engine.free()
            cleaning.result(LONG)
        assert ids(first) and made.state().threads == 0 and not made.closed
        assert ids(made.generate([[5]], SEEDED)) and made.state().threads == 1


def test_an_engine_closed_behind_its_back_fails_what_is_queued():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        queued = [made.submit_generate([[n]], SEEDED) for n in (4, 5)]
        closing = threading.Thread(target=made.backend.close)
        closing.start()
        engine.release()
        closing.join(LONG)
        engine.free()
        assert all(
            future.exception(LONG) is None or isinstance(future.exception(), BackendClosedError) for future in queued
        )
        with pytest.raises(BackendClosedError):
            made.generate([[3]], SEEDED)


def test_even_a_system_exit_in_the_engine_answers_its_requests():
    class Exiting(Held):
        def _pass(self, request):
            super()._pass(request)
            if rows_of(request) == [[4]]:
                sys.exit(3)
            return set()

    engine = Exiting()
    with batcher(engine) as made:
        error = made.submit_generate([[4]], SEEDED).exception(LONG)
        assert isinstance(error, EngineError) and isinstance(error.__cause__, SystemExit)
        assert ids(made.generate([[5]], SEEDED))


def test_a_thread_that_fails_leaves_no_future_pending():
    class Broken(Clock):
        broken = False

        def __call__(self):
            if self.broken and threading.current_thread().name.startswith("corelm"):
                raise ZeroDivisionError("the clock is broken")
            return super().__call__()

    engine, clock = Held(permits=0), Broken()
    with batcher(engine, clock=clock) as made:
        first = hold_one(engine, made)
        queued = made.submit_generate([[4]], SEEDED)
        clock.broken = True
        engine.free()
        for future in (first, queued):
            error = future.exception(LONG)
            assert isinstance(error, EngineError) and isinstance(error.__cause__, ZeroDivisionError)
        clock.broken = False
        assert ids(made.generate([[5]], SEEDED)), "the next request finds a new thread"


def test_an_abandoned_batcher_is_garbage_and_its_threads_end():
    engine = Held()
    made = DynamicBatcher(Backend(engine, "held"))
    kept = made.submit_generate([[4]], SEEDED, timeout=60.0)
    assert ids(kept)
    threads, gone = made._desk.threads(), weakref.ref(made)
    assert threads
    del made
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    made = DynamicBatcher(Backend(engine, "held"))
    # Nobody holds the batcher, but somebody waits.
    future = made.submit_generate([[4]], SEEDED)
    threads = made._desk.threads()
    del made
    assert ids(future)
    gc.collect()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


PROGRAM = """
import threading
from batching_fakes import Held
from corelm import Backend
from corelm.batching import DynamicBatcher
engine = Held(permits={permits})
made = DynamicBatcher(Backend(engine, "held"), min_batch_size=2, batching_timeout=1000.0)
futures = [made.submit_generate([[n]], {{"max_new_tokens": 2}}, timeout=1000.0) for n in (3, 4, 5)]
engine.wait_for_calls(1)
waiting = threading.Thread(target=lambda: print(repr(futures[2].exception())), daemon=True)
waiting.start()
{end}
"""


@pytest.mark.parametrize(
    ("permits", "end", "status"),
    [("None", "", 0), ("None", "raise SystemExit(3)", 3), ("0", "engine.free()", 0), ("None", "1 / 0", 1)],
)
def test_an_interpreter_that_ends_is_not_held_up(permits, end, status):
    program = PROGRAM.format(permits=permits, end=end)
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    path = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        command, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert "Fatal" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr


# Turns ---------------------------------------------------------------------------------------------------------------


def test_new_weights_wait_for_what_came_before_and_rows_say_which_made_them():
    engine = Held(permits=0)
    with batcher(engine) as made, ThreadPoolExecutor(1) as pool:
        first = hold_one(engine, made)
        before = made.submit_generate([[4]], SEEDED)
        update = pool.submit(made.update_weights, {}, "new")
        until(lambda: made.state().queued >= 2)
        after = made.submit_generate([[5]], SEEDED)
        engine.free()
        assert update.result(LONG) == "new" and made.weight_version == "new"
        versions = [future.result(LONG).weight_versions for future in (first, before, after)]
    assert versions == [("0",), ("0",), ("new",)]
    assert [type(each).__name__ for each in engine.requests] == ["WeightUpdate"]
    assert [rows_of(call) for call in engine.calls] == [[[3]], [[4]], [[5]]]


def test_an_update_that_fails_lets_the_others_go_on():
    engine = Held()
    engine.updated = False
    with batcher(engine) as made:
        with pytest.raises(EngineError, match="not in force"):
            made.update_weights({})
        assert ids(made.generate([[5]], SEEDED)) and made.weight_version == "0"


def test_gradients_are_computed_on_their_callers_thread_in_turn():
    threads = []

    class Seen(Held):
        def _pass(self, request):
            threads.append(threading.current_thread())
            return super()._pass(request)

    engine = Seen(permits=0, **can())
    with batcher(engine) as made, ThreadPoolExecutor(1) as pool:
        first = hold_one(engine, made)
        mine = pool.submit(lambda: (threading.current_thread(), made.score_logprobs([[4, 5]], grad=True)))
        until(lambda: made.state().queued >= 1)
        later = made.submit_generate([[6]], SEEDED)
        alone = made.submit_score_logprobs([[4, 5]], grad=True)
        engine.free()
        thread, batch = mine.result(LONG)
        batch.logprobs.values.sum().backward()
        assert ids(first) and ids(later) and alone.result(LONG).logprobs.values.requires_grad
    assert threads[1] is thread and threads[0] is threads[2] is not thread


def test_a_turn_that_comes_too_late_is_a_timeout_and_blocks_nobody():
    engine = Held(permits=0, **can())
    with batcher(engine) as made:
        first = hold_one(engine, made)
        with pytest.raises(BackendTimeoutError):
            made.score_logprobs([[4, 5]], grad=True, timeout=0.01)
        engine.free()
        assert ids(first) and ids(made.generate([[4]], SEEDED))


def test_a_callback_may_ask_and_close():
    engine = Held(permits=0)
    made = DynamicBatcher(Backend(engine, "held"))
    first, seen = hold_one(engine, made), []

    def back(future):
        seen.append(ids(made.generate([[4]], SEEDED)))
        seen.append(made.update_weights({}))
        made.close()

    first.add_done_callback(back)
    threads = made._desk.threads()
    engine.free()
    assert ids(first)
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert seen == [[answer([4], int(answer_seeds(7, [0])), 2, 1.0)], "1"] and made.closed


# Engines that batch by themselves ------------------------------------------------------------------------------------


def test_an_engine_with_batching_of_its_own_is_called_directly_with_a_bound():
    engine = Held(permits=0, **can(concurrent_calls=True))
    with batcher(engine, max_batch_size=5) as made:
        futures = [made.submit_generate([[3 + n % 9]], {**SHORT, "seed": n}) for n in range(12)]
        engine.wait_for(lambda: engine.inside == 5)
        assert made.state().in_flight == 5 and made.state().queued == 7
        assert futures[-1].cancel() and made.state().queued == 6
        engine.free()
        for n, future in enumerate(futures[:-1]):
            assert ids(future) == [answer([3 + n % 9], int(answer_seeds(n, [0])), 2, 1.0)]
    assert engine.most_inside == 5 and len(engine.calls) == 11
    assert all(len(call.prompts) == 1 for call in engine.calls)


def test_there_an_update_is_alone_in_the_engine():
    engine = Held(permits=0, **can(concurrent_calls=True))
    with batcher(engine) as made, ThreadPoolExecutor(1) as pool:
        before = [made.submit_generate([[n]], SEEDED) for n in (4, 5)]
        engine.wait_for(lambda: engine.inside == 2)
        update = pool.submit(made.update_weights, {}, "new")
        until(lambda: made.state().queued >= 1)
        after = made.submit_generate([[6]], SEEDED)
        engine.free()
        assert update.result(LONG) == "new"
        assert [future.result(LONG).weight_versions[0] for future in (*before, after)] == ["0", "0", "new"]


def test_there_an_update_that_does_not_drain_does_not_queue():
    engine = Held(permits=0, **can(concurrent_calls=True))
    with batcher(engine, max_batch_size=1) as made:
        running = hold_one(engine, made)
        queued = made.submit_generate([[4]], SEEDED)
        made.update_weights({}, "new", drain=False)
        engine.free()
        assert running.result(LONG).finish_reasons == ("abort",)
        assert queued.result(LONG).weight_versions == ("new",)
