"""Requests that are cancelled or aborted, and those that find no room."""

from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import pytest

from corelm.batching import QueueFullError
from corelm.errors import CapabilityError
from helpers.batching_fakes import LONG, SEEDED, Held, batcher, can, hold_one, ids, rows_of, until


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
