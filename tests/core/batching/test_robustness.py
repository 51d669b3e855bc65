"""What one caller does (an endless timeout, a failing callback, an abort that hangs) affects no other caller."""

import _thread
import asyncio
import sys
import threading

import pytest

from corelm import hookimpl
from corelm.errors import BackendTimeoutError, EngineError
from helpers.batching_fakes import (
    LONG,
    POISON,
    SEEDED,
    GatedEngine,
    all_capabilities,
    hold_one,
    ids,
    lone_answer,
    open_batcher,
)
from helpers.each import each


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
