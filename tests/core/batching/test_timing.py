"""When a batch is sent, and when a request times out."""

import time
from concurrent.futures import wait

import pytest

from corelm.errors import BackendTimeoutError
from helpers.batching_fakes import (
    LONG,
    SEEDED,
    Clock,
    GatedEngine,
    hold_one,
    ids,
    lone_answer,
    open_batcher,
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
