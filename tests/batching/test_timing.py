"""When a batch is sent, and when a request's time is over."""

from __future__ import annotations

from concurrent.futures import wait

import pytest

from corelm.backend.seeds import answer_seeds
from corelm.errors import BackendTimeoutError
from helpers.batching_fakes import LONG, SEEDED, Clock, Held, answer, batcher, hold_one, ids, until


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
        # Whoever waits is woken before the queue hears of it.
        until(lambda: made.state().queued == 0)
        assert not first.done()
        engine.free()
        assert ids(first)
    assert len(engine.calls) == 1


def test_a_request_whose_time_is_over_in_the_engine_leaves_its_company_alone():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        patient = made.submit_generate([[4]], SEEDED)
        hasty = made.submit_generate([[5]], SEEDED, timeout=2.0)
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
