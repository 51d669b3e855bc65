"""A bad request fails alone: the other requests of its batch are answered, and so are later ones."""

import threading

import pytest

from corelm import hookimpl
from corelm.errors import BackendTimeoutError, CapabilityError, EngineError
from helpers.batching_fakes import (
    LONG,
    POISON,
    SEEDED,
    GatedEngine,
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
