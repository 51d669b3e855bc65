"""Requests that are cancelled or aborted, and requests that find the queue full."""

import _thread
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import pytest

from corelm.batching import QueueFullError
from corelm.errors import CapabilityError
from helpers.batching_fakes import (
    LONG,
    SEEDED,
    GatedEngine,
    all_capabilities,
    hold_one,
    ids,
    open_batcher,
    rows_of,
    wait_until,
)


def test_a_request_cancelled_in_the_queue_is_not_sent():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        kept, dropped = (batcher.submit_generate([[n]], SEEDED) for n in (4, 5))
        assert dropped.cancel() and dropped.cancelled()
        assert batcher.state().queued == 1
        engine.free()
        assert ids(kept)
        assert wait([dropped], LONG).done
        with pytest.raises(CancelledError):
            dropped.result()
    assert rows_of(engine.calls[1]) == [[4]]


def test_a_request_cancelled_in_the_engine_is_aborted_by_name():
    engine = GatedEngine(permits=0, **all_capabilities())
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        kept = batcher.submit_generate([[4]], SEEDED, request_ids=["kept"])
        dropped = batcher.submit_generate([[5]], SEEDED, request_ids=["dropped"])
        engine.release()
        engine.wait_for_calls(2)
        assert dropped.cancel()
        engine.wait_for(lambda: bool(engine.aborted))
        engine.free()
        assert ids(kept)
    assert engine.aborted == {"dropped"}


def test_cancelling_a_request_in_an_engine_that_cannot_abort_affects_no_other_request():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        first = hold_one(engine, batcher)
        assert first.cancel()
        second = batcher.submit_generate([[4]], SEEDED)
        engine.free()
        assert ids(second)


def test_abort_ends_the_named_requests_in_the_queue_and_in_the_engine():
    engine = GatedEngine(permits=0, **all_capabilities())
    with open_batcher(engine) as batcher:
        first = batcher.submit_generate([[3]], SEEDED, request_ids=["in"])
        engine.wait_for_calls(1)
        queued = batcher.submit_generate([[4], [5]], SEEDED, request_ids=["a", "b"])
        kept = batcher.submit_generate([[6]], SEEDED, request_ids=["c"])
        scored = batcher.submit_score_logprobs([[6, 7]], request_ids=["s"])
        batcher.abort(["in", "a", "b", "s"])
        for future, rows in ((first, 1), (queued, 2)):
            assert future.result(LONG).finish_reasons == ("abort",) * rows and ids(future) == [[]] * rows
        assert "aborted" in str(scored.exception(LONG))
        engine.free()
        assert ids(kept) != [[]]
    with open_batcher(GatedEngine()) as batcher, pytest.raises(CapabilityError):
        batcher.abort(["x"])


def test_a_full_queue_blocks_further_callers_until_there_is_room():
    engine = GatedEngine(permits=0)
    with open_batcher(engine, max_queue=2) as batcher, ThreadPoolExecutor(2) as pool:
        hold_one(engine, batcher)
        queued = [batcher.submit_generate([[n]], SEEDED) for n in (4, 5)]
        entering = pool.submit(batcher.submit_generate, [[6]], SEEDED)
        wait_until(lambda: batcher.state().outside > 0)
        assert not entering.done() and batcher.state().queued == 3
        queued[0].cancel()
        third = entering.result(LONG)
        assert batcher.state().outside == 0
        engine.free()
        assert ids(third) and ids(queued[1])


def test_a_full_queue_refuses_requests_with_on_full_raise():
    engine = GatedEngine(permits=0)
    with open_batcher(engine, max_queue=1, on_full="raise") as batcher:
        hold_one(engine, batcher)
        queued = batcher.submit_generate([[4]], SEEDED)
        with pytest.raises(QueueFullError, match=r"max_queue=1 .* larger max_queue, .*on_full='block'") as error:
            batcher.generate([[5]], SEEDED)
        assert error.value.usable
        engine.free()
        assert ids(queued)


def test_an_interrupt_of_the_wait_for_room_cancels_the_request():
    engine = GatedEngine(permits=0)
    with open_batcher(engine, max_queue=1) as batcher:
        hold_one(engine, batcher)
        queued = batcher.submit_generate([[4]], SEEDED)

        def interrupt():
            wait_until(lambda: batcher.state().outside > 0)
            _thread.interrupt_main()

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            batcher.submit_generate([[5]], SEEDED)
        assert batcher.state().queued == 1
        engine.free()
        assert ids(queued)
