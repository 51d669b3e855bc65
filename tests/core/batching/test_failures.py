"""A bad request fails alone: the other requests of its batch are answered, and so are later ones."""

import _thread
import asyncio
import sys
import threading

import pytest

from corelm import hookimpl
from corelm.errors import BackendTimeoutError, CapabilityError, EngineError
from helpers.batching_fakes import (
    LONG,
    POISON,
    SEEDED,
    GatedEngine,
    all_capabilities,
    hold_one,
    ids,
    lone_answer,
    no_room_for,
    open_batcher,
    rows_of,
)
from helpers.each import each


def test_a_request_that_fails_in_the_engine_fails_alone():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = [batcher.submit_generate([[POISON if n == 5 else n + 3]], SEEDED) for n in range(9)]
        engine.free()
        for n, future in enumerate(futures):
            if n == 5:
                error = future.exception(LONG)
                assert isinstance(error, EngineError) and "poisoned" in str(error) and error.__cause__ is engine.error
            else:
                assert ids(future) == [lone_answer([n + 3])]
        assert ids(batcher.generate([[5]], SEEDED)), "later calls must still work"
    # One call for all requests, then halves: 9 -> 4 + 5 -> 2 + 3 -> 1 + 2.
    assert [len(call.prompts) for call in engine.calls[1:-1]] == [9, 4, 5, 2, 1, 1, 3] or len(engine.calls) < 10


def test_skipped_rows_are_put_back_and_a_failed_row_affects_only_its_request():
    class RowErrors(GatedEngine):
        @hookimpl
        def generate(self, request):  # type: ignore[override]
            batch = super().generate(request)
            bad = [row[0] == 14 for row in request.prompts.tolist()]
            return type(batch)(
                ids=batch.ids,
                logprobs=batch.logprobs,
                finish_reasons=tuple("error" if b else r for b, r in zip(bad, batch.finish_reasons, strict=True)),
                errors=tuple("no fourteen" if b else "" for b in bad),
            )

    engine = RowErrors(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        fine = batcher.submit_generate([[5]], SEEDED)
        strict = batcher.submit_generate([[4], [14]], SEEDED)
        lenient = batcher.submit_generate([[99], [14], [4]], SEEDED, on_error="skip")
        engine.free()
        assert ids(fine) and fine.result().finish_reasons == ("length",)
        error = strict.exception(LONG)
        assert isinstance(error, EngineError) and error.problems == {1: "no fourteen"}
        batch = lenient.result(LONG)
        assert batch.finish_reasons == ("error", "error", "length") and batch.ids.lengths.tolist() == [0, 2, 2]
        assert "outside the vocabulary" in batch.errors[0] and batch.errors[1:] == ("no fourteen", "")
    assert len(engine.calls) == 2


@each(
    "error, calls",
    [
        (EngineError("gone", usable=False), 1),
        (BackendTimeoutError("slow"), 1),
        (CapabilityError("cannot"), 1),
        (EngineError("unknown cause"), 2 * 8 - 1),
    ],
)
def test_a_failed_batch_is_retried_in_halves_unless_the_error_concerns_every_request(error, calls):
    engine = GatedEngine(permits=0, error=error)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = [batcher.submit_generate([[POISON]], SEEDED) for _ in range(8)]
        engine.free()
        raised = [future.exception(LONG) for future in futures]
        assert all(type(each) is type(error) and str(error) in str(each) for each in raised)
        assert len({id(each) for each in raised}) == 8, "each caller must get a separate error to raise"
    assert len(engine.calls) == 1 + calls


def test_an_unhealthy_engine_is_not_called_again():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = [batcher.submit_generate([[POISON]], SEEDED) for _ in range(8)]
        engine.alive = False
        engine.free()
        assert all(isinstance(future.exception(LONG), EngineError) for future in futures)
    assert len(engine.calls) == 2


def test_a_request_cancelled_during_a_failing_call_is_not_retried():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        poisoned, gone, kept = (batcher.submit_generate([[n]], SEEDED) for n in (POISON, 4, 5))
        engine.release()
        engine.wait_for_calls(2)
        assert gone.cancel()
        engine.free()
        assert isinstance(poisoned.exception(LONG), EngineError) and ids(kept)
    assert [rows_of(call) for call in engine.calls[2:]] == [[[POISON]], [[5]]]


def test_a_result_with_too_few_rows_fails_the_call_and_is_never_shared_out():
    class OneRowEngine(GatedEngine):
        @hookimpl
        def generate(self, request):  # type: ignore[override]
            batch = super().generate(request)
            return type(batch)(
                ids=batch.ids.select([0]), logprobs=batch.logprobs.select([0]), finish_reasons=("length",)
            )

    engine = OneRowEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        one, two = (batcher.submit_generate([[n]], SEEDED) for n in (4, 5))
        pair = batcher.submit_generate([[6], [7]], SEEDED)
        engine.free()
        assert ids(one) == [lone_answer([4])]
        assert ids(two) == [lone_answer([5])]
        assert "1 rows for 2 answers" in str(pair.exception(LONG))


def test_requests_with_equal_request_ids_do_not_share_a_call():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = [batcher.submit_generate([[n]], SEEDED, request_ids=["mine"]) for n in (4, 5)]
        engine.free()
        assert [ids(future)[0] for future in futures] == [lone_answer([n]) for n in (4, 5)]


@pytest.mark.parametrize("timeout", [None, LONG])
def test_a_request_for_which_the_system_has_no_room_for_a_thread_is_refused_and_not_queued(timeout, monkeypatch):
    engine = GatedEngine()
    with open_batcher(engine) as batcher:
        monkeypatch.setattr(threading.Thread, "start", no_room_for("corelm"))
        for call in (batcher.submit_generate, batcher.generate):
            with pytest.raises(EngineError, match="needs a thread: can't start new thread") as error:
                call([[3]], SEEDED, timeout=timeout)
            assert error.value.usable
        assert batcher.state().queued == 0
        monkeypatch.undo()
        assert ids(batcher.generate([[3]], SEEDED, timeout=timeout)) == [lone_answer([3])]
    assert len(engine.calls) == 1


def test_an_error_of_a_shared_call_names_no_rows_of_other_callers():
    engine = GatedEngine(permits=0, error=EngineError("gone", usable=False, problems={1: "gone"}))
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = [batcher.submit_generate([[n]], SEEDED) for n in (4, POISON)]
        engine.free()
        assert [future.exception(LONG).problems for future in futures] == [{}, {}]
    assert len(engine.calls) == 2


# What one caller does affects no other --------------------------------------------------------------------------------


@each("endless", [1e10, float(sys.maxsize)])
def test_an_endless_timeout_does_not_end_the_timeouts_of_others(endless):
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        endlessly = batcher.submit_generate([[3]], SEEDED, timeout=endless)
        engine.wait_for_calls(1)
        assert isinstance(batcher.submit_generate([[4]], SEEDED, timeout=0.05).exception(LONG), BackendTimeoutError)
        assert isinstance(batcher.submit_generate([[5]], SEEDED, timeout=0.05).exception(LONG), BackendTimeoutError)
        engine.free()
        assert ids(endlessly) == [lone_answer([3])]


def test_a_timeout_does_not_wait_for_the_aborts_of_others():
    class SlowAbort(GatedEngine):
        aborting, may_abort, calls_of_abort = threading.Event(), threading.Event(), 0

        @hookimpl
        def abort(self, request):
            self.aborting.set()
            self.calls_of_abort += 1
            assert self.may_abort.wait(LONG)
            return super().abort(request)

    engine = SlowAbort(permits=0, **all_capabilities(concurrent_calls=True, stops_at_timeout=True))
    with open_batcher(engine) as batcher:
        futures = [batcher.submit_generate([[n]], SEEDED, request_ids=[str(n)]) for n in (3, 4, 5, 6)]
        engine.wait_for_calls(4)
        assert all(future.cancel() for future in futures)
        assert engine.aborting.wait(LONG)
        assert isinstance(batcher.submit_generate([[7]], SEEDED, timeout=0.05).exception(LONG), BackendTimeoutError)
        assert not engine.aborted
        engine.may_abort.set()
        engine.wait_for(lambda: engine.aborted >= {"3", "4", "5", "6"})
        assert engine.calls_of_abort <= 3, "names that wait must share a call"
    assert batcher.state().threads == 0


def exits(future):
    sys.exit(3)


def test_a_callback_that_exits_fails_no_other_request_of_its_batch():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = [batcher.submit_generate([[n]], SEEDED) for n in (4, 5, 6)]
        futures[0].add_done_callback(exits)
        threads = batcher.dispatcher.threads()
        engine.free()
        assert [ids(future) for future in futures] == [[lone_answer([n])] for n in (4, 5, 6)]
        assert ids(batcher.generate([[7]], SEEDED)) == [lone_answer([7])]
        assert batcher.dispatcher.threads() == threads, "the thread must go on"
    assert len(engine.calls) == 3


@each("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_engine_that_raises_no_exception_fails_the_request_at_fault_only(error):
    engine = GatedEngine(permits=0, error=error)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = [batcher.submit_generate([[n]], SEEDED) for n in (4, POISON, 5)]
        engine.free()
        assert [ids(futures[at]) for at in (0, 2)] == [[lone_answer([4])], [lone_answer([5])]]
        failure = futures[1].exception(LONG)
        assert isinstance(failure, EngineError) and failure.__cause__ is error


def test_an_interrupt_that_ends_no_wait_is_noticed():
    engine = GatedEngine(permits=0)

    def interrupt():
        engine.wait_for_calls(1)
        _thread.interrupt_main()

    with open_batcher(engine) as batcher:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            batcher.generate([[3]], SEEDED)
        engine.free()
        assert ids(batcher.generate([[7]], SEEDED)) == [lone_answer([7])]
