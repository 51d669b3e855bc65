"""However it ends, no future is left pending and no thread alive."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from corelm import Backend
from corelm.batching import DynamicBatcher, Limits
from corelm.errors import BackendClosedError, EngineError
from helpers.batching_fakes import LONG, SEEDED, Clock, Held, batcher, can, hold_one, ids, rows_of, until


@pytest.mark.parametrize("flush", [True, False])
def test_closing_leaves_no_future_pending_and_no_thread(flush):
    engine = Held(permits=0)
    made = DynamicBatcher(
        Backend.from_plugin(engine, "held"), Limits(min_batch_size=3, batching_timeout=60.0, max_queue=2)
    )
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
    made = DynamicBatcher(Backend.from_plugin(engine, "held"))
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
    made = DynamicBatcher(Backend.from_plugin(engine, "held"))
    kept = made.submit_generate([[4]], SEEDED, timeout=60.0)
    assert ids(kept)
    threads, gone = made.dispatcher.threads(), weakref.ref(made)
    assert threads
    del made
    gc.collect()
    # A thread that has just answered lets go of it a moment later.
    until(lambda: gone() is None)
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    made = DynamicBatcher(Backend.from_plugin(engine, "held"))
    # Nobody holds the batcher, but somebody waits.
    future = made.submit_generate([[4]], SEEDED)
    threads = made.dispatcher.threads()
    del made
    assert ids(future)
    gc.collect()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


PROGRAM = """
import threading
from helpers.batching_fakes import Held
from corelm import Backend
from corelm.batching import DynamicBatcher, Limits
engine = Held(permits={permits})
made = DynamicBatcher(Backend.from_plugin(engine, "held"), Limits(min_batch_size=2, batching_timeout=1000.0))
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
