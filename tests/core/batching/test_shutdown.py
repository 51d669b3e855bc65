"""Shutting a batcher down leaves no future pending and no thread alive."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from corelm import Backend
from corelm.batching import DynamicBatcher, Limits
from corelm.batching.batcher import stop_together
from corelm.errors import BackendClosedError
from helpers.batching_fakes import (
    LONG,
    SEEDED,
    GatedEngine,
    all_capabilities,
    hold_one,
    ids,
    join_threads,
    lone_answer,
    open_batcher,
    wait_until,
)
from helpers.each import each


@each("flush", [True, False])
def test_closing_leaves_no_future_pending_and_no_thread(flush):
    engine = GatedEngine(permits=0)
    batcher = DynamicBatcher(
        Backend.from_plugin(engine, "gated"), Limits(min_batch_size=3, batching_timeout=60.0, max_queue=2)
    )
    running = [batcher.submit_generate([[n], [n]], SEEDED) for n in (3, 4)]
    engine.wait_for_calls(1)
    with ThreadPoolExecutor(3) as pool:
        queued = [batcher.submit_generate([[n]], SEEDED, timeout=60.0) for n in (5, 6)]
        entering = pool.submit(batcher.submit_generate, [[7]], SEEDED)
        wait_until(lambda: batcher.state().outside > 0)
        closing = pool.submit(batcher.close, flush=flush)
        wait_until(lambda: batcher.state().closed)
        with pytest.raises(BackendClosedError):
            batcher.generate([[3]], SEEDED)
        engine.free()
        closing.result(LONG)
        queued.append(entering.result(LONG))
    assert all(ids(future) for future in running), "a request in the engine must be answered"
    for future in queued:
        assert future.done()
        assert ids(future) if flush else isinstance(future.exception(), BackendClosedError)
    assert batcher.closed and batcher.state().threads == 0
    batcher.close()


def test_closing_without_flush_aborts_running_calls_if_the_engine_can_abort():
    engine = GatedEngine(permits=0, **all_capabilities())
    batcher = DynamicBatcher(Backend.from_plugin(engine, "gated"))
    running = hold_one(engine, batcher)
    batcher.close(flush=False)
    assert running.result().finish_reasons == ("abort",)


def test_cleanup_ends_the_threads_and_a_later_request_starts_one():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        first = hold_one(engine, batcher)
        queued = batcher.submit_generate([[4]], SEEDED)
        with ThreadPoolExecutor(1) as pool:
            cleaning = pool.submit(batcher.cleanup, flush=False)
            assert isinstance(queued.exception(LONG), BackendClosedError)
            engine.free()
            cleaning.result(LONG)
        assert ids(first) and batcher.state().threads == 0 and not batcher.closed
        assert ids(batcher.generate([[5]], SEEDED)) and batcher.state().threads > 0


def test_cleaning_up_ends_while_others_go_on_calling():
    engine, stop = GatedEngine(concurrent_calls=True), threading.Event()
    with open_batcher(engine) as batcher:

        def call():
            while not stop.is_set():
                assert ids(batcher.generate([[4]], SEEDED)) == [lone_answer([4])]

        with ThreadPoolExecutor(4) as pool:
            calling = [pool.submit(call) for _ in range(4)]
            for flush in (True, False):
                started = time.monotonic()
                try:
                    batcher.cleanup(flush=flush)
                finally:
                    assert time.monotonic() - started < LONG
            stop.set()
            for each_call in calling:
                error = each_call.exception(LONG)
                assert error is None or isinstance(error, BackendClosedError)


def test_an_unreferenced_batcher_is_collected_and_its_threads_end():
    engine = GatedEngine()
    batcher = DynamicBatcher(Backend.from_plugin(engine, "gated"))
    kept = batcher.submit_generate([[4]], SEEDED, timeout=60.0)
    assert ids(kept)
    threads, reference = batcher.dispatcher.threads(), weakref.ref(batcher)
    assert threads
    del batcher
    gc.collect()
    # A thread that has just answered keeps a reference to the batcher for a moment.
    wait_until(lambda: reference() is None)
    join_threads(threads)
    batcher = DynamicBatcher(Backend.from_plugin(engine, "gated"))
    future = batcher.submit_generate([[4]], SEEDED)
    threads = batcher.dispatcher.threads()
    # A request that still waits keeps its batcher alive until it is answered.
    del batcher
    assert ids(future)
    gc.collect()
    join_threads(threads)


def test_batchers_in_front_of_hung_engines_stop_together_at_one_deadline(monkeypatch):
    engines = [GatedEngine(permits=0) for _ in range(3)]
    batchers = [DynamicBatcher(Backend.from_plugin(engine, "gated")) for engine in engines]
    running = [hold_one(engine, batcher) for engine, batcher in zip(engines, batchers, strict=True)]
    threads = [thread for batcher in batchers for thread in batcher.dispatcher.threads()]
    graces = []
    stop = type(batchers[0].dispatcher).stop

    def noted(dispatcher, **options):
        # All are told to stop before one is waited for, and what is waited for one is not there for the next.
        assert all(batcher.closed for batcher in batchers)
        graces.append(options["grace"])
        return stop(dispatcher, **options)

    monkeypatch.setattr(type(batchers[0].dispatcher), "stop", noted)
    stop_together([batcher.dispatcher for batcher in batchers], time.monotonic() + 0.5)
    assert graces == [0.0] * 3
    assert all(isinstance(future.exception(0), BackendClosedError) for future in running)
    for engine in engines:
        engine.free()
    join_threads(threads)


PROGRAM = """
import threading
from helpers.batching_fakes import GatedEngine
from corelm import Backend
from corelm.batching import DynamicBatcher, Limits
engine = GatedEngine(permits={permits})
batcher = DynamicBatcher(Backend.from_plugin(engine, "gated"), Limits(min_batch_size=2, batching_timeout=1000.0))
futures = [batcher.submit_generate([[n]], {{"max_new_tokens": 2}}, timeout=1000.0) for n in (3, 4, 5)]
engine.wait_for_calls(1)
waiting = threading.Thread(target=lambda: print(repr(futures[2].exception())), daemon=True)
waiting.start()
{end}
"""


@pytest.mark.process
@each(
    "permits, end, status",
    [("None", "", 0), ("None", "raise SystemExit(3)", 3), ("0", "engine.free()", 0), ("None", "1 / 0", 1)],
)
def test_a_batcher_does_not_keep_the_interpreter_from_exiting(permits, end, status):
    program = PROGRAM.format(permits=permits, end=end)
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    path = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        command, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert "Fatal" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
