"""When a batch is sent, and when a request times out."""

import _thread
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import pytest

from corelm.batching import QueueFullError
from corelm.errors import BackendTimeoutError, CapabilityError
from helpers.batching_fakes import (
    LONG,
    SEEDED,
    Clock,
    GatedEngine,
    all_capabilities,
    hold_one,
    ids,
    lone_answer,
    open_batcher,
    rows_of,
    wait_until,
)


def test_a_batch_is_sent_once_min_batch_size_rows_are_waiting():
    engine, clock = GatedEngine(), Clock()
    with open_batcher(engine, min_batch_size=3, batching_timeout=60.0, clock=clock) as batcher:
        futures = [batcher.submit_generate([[n]], SEEDED) for n in (3, 4)]
        assert batcher.state().queued == 2 and not engine.calls
        futures.append(batcher.submit_generate([[5]], SEEDED))
        wait(futures, LONG)
    assert [len(call.prompts) for call in engine.calls] == [3]


def test_a_smaller_batch_is_sent_when_its_oldest_request_has_waited_batching_timeout():
    engine, clock = GatedEngine(), Clock()
    with open_batcher(engine, min_batch_size=3, batching_timeout=60.0, clock=clock) as batcher:
        first = batcher.submit_generate([[3]], SEEDED)
        clock.now += 59.0
        # Each new request makes the thread read the clock.
        other = batcher.submit_generate([[4]], {**SEEDED, "temperature": 0.5})
        assert batcher.state().oldest_wait == 59.0 and not engine.calls
        clock.now += 1.0
        second = batcher.submit_generate([[5]], {**SEEDED, "temperature": 0.7})
        assert ids(first) == [lone_answer([3])]
        assert not other.done() and not second.done()
        assert batcher.state().queued == 2
        batcher.cleanup(flush=True)
        assert other.done() and second.done()


def test_a_lone_request_is_sent_after_batching_timeout_by_a_real_clock():
    with open_batcher(GatedEngine(), min_batch_size=9, batching_timeout=0.01) as batcher:
        assert ids(batcher.generate([[3]], SEEDED))


def test_a_queued_request_times_out_while_the_engine_is_busy():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        first = hold_one(engine, batcher)
        with pytest.raises(BackendTimeoutError):
            batcher.generate([[4]], SEEDED, timeout=0.01)
        with pytest.raises(BackendTimeoutError):
            batcher.score_logprobs([[4, 5]], grad=False, timeout=0.01)
        future = batcher.submit_generate([[4]], SEEDED, timeout=0.01)
        assert isinstance(future.exception(LONG), BackendTimeoutError)
        # The waiting caller wakes up before the request leaves the queue.
        wait_until(lambda: batcher.state().queued == 0)
        assert not first.done()
        engine.free()
        assert ids(first)
    assert len(engine.calls) == 1


def test_a_request_that_times_out_in_the_engine_does_not_affect_the_rest_of_its_batch():
    engine, clock = GatedEngine(permits=0), Clock()
    with open_batcher(engine, clock=clock) as batcher:
        hold_one(engine, batcher)
        patient = batcher.submit_generate([[4]], SEEDED)
        hasty = batcher.submit_generate([[5]], SEEDED, timeout=0.1)
        engine.release()
        engine.wait_for_calls(2)
        clock.now += 1.0
        assert isinstance(hasty.exception(LONG), BackendTimeoutError)
        assert not patient.done()
        engine.free()
        assert ids(patient)
    assert engine.calls[1].timeout is None and len(engine.calls[1].prompts) == 2


def test_a_shared_call_gets_the_longest_time_left_among_its_requests():
    engine, skipped = GatedEngine(permits=0), 0.0
    # The clock runs, because the batcher waits a moment for the first caller to come back.
    with open_batcher(engine, clock=lambda: time.monotonic() + skipped) as batcher:
        first = hold_one(engine, batcher)
        futures = [batcher.submit_generate([[4]], SEEDED, timeout=t) for t in (100.0, 300.0)]
        skipped = 50.0
        engine.free()
        assert ids(first)
        assert all(ids(future) for future in futures)
    assert 199.0 < engine.calls[1].timeout <= 250.0


# Requests that are cancelled or aborted, and requests that find the queue full ----------------------------------------


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
