"""A timeout ends the caller's wait even if the engine goes on, and closing does not wait for such a call for ever."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from corelm import Backend, DynamicBatcher, hookimpl
from corelm.errors import BackendClosedError, BackendTimeoutError, EngineError
from helpers.batching_fakes import (
    LONG,
    SEEDED,
    GatedEngine,
    all_capabilities,
    corelm_threads,
    ids,
    join_threads,
    lone_answer,
    wait_until,
)
from helpers.each import each
from helpers.fakes import SHORT, Fake, Gate, fake, sent
from helpers.insides import a_call_waits

ENDLESS = [1e10, float(sys.maxsize), 1e300]


@each("endless", ENDLESS)
def test_a_call_with_an_endless_timeout_waits_for_its_turn(endless):
    gate = Gate()
    backend = Backend.from_plugin(Fake(gate), "fake", timeout=endless)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(backend.generate, [[1]], SHORT)
        gate.wait_for_call()
        second = pool.submit(backend.generate, [[3]], SHORT, timeout=endless)
        gate.opened.set()
        assert ids(first) == [[1, 1]] and ids(second) == [[3, 3]]


def test_a_timeout_ends_the_wait_and_later_calls_wait_for_the_engine():
    gate = Gate()
    backend = fake(gate)
    # Long enough for a new thread to reach the engine on a busy machine.
    with pytest.raises(BackendTimeoutError, match=r"generate: no answer within the timeout; the engine still works"):
        backend.generate([[1]], SHORT, timeout=2.0)
    assert gate.entered.is_set()
    # The timeout may pass before the call waits for its turn.
    with pytest.raises(BackendTimeoutError, match=r"busy with other calls|before the engine was called"):
        backend.generate([[3]], SHORT, timeout=0.1)
    assert len(sent(backend)) == 1, "one call at a time"
    threads = corelm_threads()
    gate.opened.set()
    assert backend.generate([[5]], SHORT).ids.tolist() == [[5, 5]]
    join_threads(threads)
    assert not corelm_threads()
    backend.close()


def test_an_engine_that_stops_by_itself_is_called_on_the_callers_thread():
    threads = []

    def note(batch):
        threads.append(threading.current_thread())
        return batch

    for stops in (True, False):
        fake(note, stops_at_timeout=stops).generate([[1]], SHORT, timeout=9.0)
    assert threads[0] is threading.current_thread() is not threads[1]
    grad = fake(note, gradients=True)
    grad.engine.plugin.bend = lambda batch: threads.append(threading.current_thread())
    with pytest.raises(EngineError):
        grad.score_logprobs([[1, 2]], grad=True, timeout=9.0)
    assert threads[2] is threading.current_thread()


def test_two_calls_that_update_the_weights_do_not_wait_for_each_other():
    together = threading.Barrier(2)

    class Updating:
        @hookimpl(wrapper=True)
        def generate(self, request):
            batch = yield
            together.wait(timeout=LONG)
            self.backend.update_weights({})
            return batch

    updating = Updating()
    engine = Fake(concurrent_calls=True)
    updating.backend = backend = Backend.from_plugin(engine, "fake", wrappers=[updating])
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(backend.generate, [[1]], SHORT) for _ in range(2)]
        errors = [future.exception(timeout=LONG) for future in futures]
    (refused,) = filter(None, errors)
    assert isinstance(refused, EngineError) and "two calls under way each want to update" in str(refused)
    assert backend.weight_version == "1"


class Closing(Fake):
    """Counts the calls of `close`; with `stuck`, `close` waits until it is set."""

    def __init__(self, *args, **capabilities):
        super().__init__(*args, **capabilities)
        self.closed, self.stuck, self.closing = 0, None, threading.Event()

    @hookimpl
    def close(self, request):
        self.closing.set()
        if self.stuck is not None:
            assert self.stuck.wait(LONG)
        self.closed += 1
        return True


def leave_a_call_behind(backend, gate):
    """Cancel a call that is in the engine."""
    call = backend.submit_generate([[1]], SHORT)
    gate.wait_for_call()
    assert call.cancel()


def test_closing_does_not_wait_for_ever_for_a_call_whose_caller_has_left():
    gate = Gate()
    engine = Closing(gate)
    backend = Backend.from_plugin(engine, "fake")
    leave_a_call_behind(backend, gate)
    for _ in range(2):
        with pytest.raises(BackendTimeoutError):
            backend.engine.close(grace=0.1)
        assert backend.closed and engine.closed == 0
    with pytest.raises(BackendClosedError):
        backend.generate([[1]], SHORT)
    threads = corelm_threads()
    gate.opened.set()
    join_threads(threads)
    assert engine.closed == 1, "the last call must release the engine"
    backend.close()
    assert engine.closed == 1


def test_a_call_that_is_cancelled_while_it_waits_for_its_turn_is_not_sent():
    gate = Gate()
    backend = fake(gate)
    first = backend.submit_generate([[1]], SHORT)
    gate.wait_for_call()
    second = backend.submit_generate([[3]], SHORT)
    wait_until(lambda: a_call_waits(backend))
    assert second.cancel()
    threads = corelm_threads()
    gate.opened.set()
    assert ids(first) == [[1, 1]]
    join_threads(threads)
    assert len(sent(backend)) == 1
    assert ids(backend.submit_generate([[5]], SHORT)) == [[5, 5]]
    backend.close()


def test_closing_waits_for_a_call_whose_caller_waits():
    gate = Gate()
    engine = Closing(gate)
    backend = Backend.from_plugin(engine, "fake")
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(backend.generate, [[1]], SHORT)
        gate.wait_for_call()
        closing = pool.submit(backend.engine.close, grace=0.01)
        with pytest.raises(TimeoutError):
            closing.result(timeout=0.5)
        gate.opened.set()
        assert ids(call) == [[1, 1]]
        closing.result(LONG)
    assert engine.closed == 1


def test_a_close_hook_that_hangs_keeps_no_other_closer_waiting():
    engine = Closing()
    engine.stuck = threading.Event()
    backend = Backend.from_plugin(engine, "fake")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(backend.close)
        assert engine.closing.wait(LONG)
        pool.submit(backend.close).result(LONG)
        assert backend.closed and not first.done()
        engine.stuck.set()
        first.result(LONG)
    assert engine.closed == 1


@pytest.mark.parametrize("flush", [True, False])
def test_closing_a_batcher_in_front_of_a_hung_engine_ends(flush, monkeypatch):
    engine = GatedEngine(permits=0, **all_capabilities(abort=False))
    batcher = DynamicBatcher(Backend.from_plugin(engine, "gated"))
    stop = batcher.dispatcher.stop
    monkeypatch.setattr("corelm.batching.batcher.GRACE_PERIOD", 0.2)
    monkeypatch.setattr(batcher.dispatcher, "stop", lambda **options: stop(grace=0.2, **options))
    # With `flush`, only the timeouts end the calls. They must not pass before the first call is in the engine.
    running = batcher.submit_generate([[3]], SEEDED, timeout=2.0 if flush else None)
    engine.wait_for_calls(1)
    queued = batcher.submit_generate([[4]], SEEDED, timeout=0.1 if flush else None)
    with pytest.raises(BackendTimeoutError):
        batcher.close(flush=flush)
    expected = BackendTimeoutError if flush else BackendClosedError
    assert isinstance(running.exception(0), expected) and isinstance(queued.exception(0), expected)
    threads = corelm_threads()
    assert threads, "closing has waited for the engine"
    engine.free()
    join_threads(threads)
    assert not batcher.dispatcher.in_flight and batcher.state().threads == 0


def test_a_batcher_frees_its_callers_and_serves_the_next_after_a_hung_call():
    engine = GatedEngine(permits=0, **all_capabilities(abort=False))
    with DynamicBatcher(Backend.from_plugin(engine, "gated")) as batcher:
        with pytest.raises(BackendTimeoutError):
            batcher.generate([[3]], SEEDED, timeout=2.0)
        assert engine.calls, "the call must be in the engine when its timeout passes"
        later = batcher.submit_generate([[4]], SEEDED)
        engine.free()
        assert ids(later) == [lone_answer([4])]
