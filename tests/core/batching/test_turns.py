"""Calls that need the engine to themselves (new weights, gradients), and calls made by callbacks and wrappers."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from corelm import Backend, hookimpl
from corelm.batching import DynamicBatcher
from corelm.errors import BackendTimeoutError
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
    rows_of,
    wait_until,
)
from helpers.each import each


def test_an_update_waits_for_earlier_requests_and_rows_carry_their_weight_version():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher, ThreadPoolExecutor(1) as pool:
        first = hold_one(engine, batcher)
        before = batcher.submit_generate([[4]], SEEDED)
        update = pool.submit(batcher.update_weights, {}, "new")
        wait_until(lambda: batcher.state().queued >= 2)
        after = batcher.submit_generate([[5]], SEEDED)
        engine.free()
        assert update.result(LONG) == "new" and batcher.weight_version == "new"
        versions = [future.result(LONG).weight_versions for future in (first, before, after)]
    assert versions == [("0",), ("0",), ("new",)]
    assert [type(each).__name__ for each in engine.requests] == ["WeightUpdate"]
    assert [rows_of(call) for call in engine.calls] == [[[3]], [[4]], [[5]]]


def test_gradients_are_computed_in_turn_on_the_callers_thread():
    threads = []

    class ThreadRecorder(GatedEngine):
        def wait_for_permit(self, request):
            threads.append(threading.current_thread())
            return super().wait_for_permit(request)

    engine = ThreadRecorder(permits=0, **all_capabilities())
    with open_batcher(engine) as batcher, ThreadPoolExecutor(1) as pool:
        first = hold_one(engine, batcher)
        mine = pool.submit(lambda: (threading.current_thread(), batcher.score_logprobs([[4, 5]], grad=True)))
        wait_until(lambda: batcher.state().queued >= 1)
        later = batcher.submit_generate([[6]], SEEDED)
        alone = batcher.submit_score_logprobs([[4, 5]], grad=True)
        engine.free()
        thread, batch = mine.result(LONG)
        batch.logprobs.values.sum().backward()
        assert ids(first) and ids(later) and alone.result(LONG).logprobs.values.requires_grad
    assert threads[1] is thread and threads[0] is threads[2] is not thread


def test_a_turn_that_comes_too_late_times_out_and_blocks_no_other_request():
    engine = GatedEngine(permits=0, **all_capabilities())
    with open_batcher(engine) as batcher:
        first = hold_one(engine, batcher)
        with pytest.raises(BackendTimeoutError):
            batcher.score_logprobs([[4, 5]], grad=True, timeout=0.01)
        engine.free()
        assert ids(first) and ids(batcher.generate([[4]], SEEDED))


def test_a_callback_may_make_calls_and_close_the_batcher():
    engine = GatedEngine(permits=0)
    batcher = DynamicBatcher(Backend.from_plugin(engine, "gated"))
    first, seen = hold_one(engine, batcher), []

    def back(future):
        seen.append(ids(batcher.generate([[4]], SEEDED)))
        seen.append(batcher.update_weights({}))
        batcher.close()

    first.add_done_callback(back)
    threads = batcher.dispatcher.threads()
    engine.free()
    assert ids(first)
    join_threads(threads)
    assert seen == [[lone_answer([4])], "1"] and batcher.closed


@each("direct", [False, True])
def test_a_wrapper_may_make_a_call_during_a_call_with_a_timeout(direct):
    """The outer call runs on a thread that is neither its caller's nor the batcher's."""

    class Nested:
        batcher, asked = None, []

        @hookimpl(wrapper=True)
        def generate(self, request):
            batch = yield
            if request.prompts.tolist() == [[3]]:
                self.asked.append(ids(self.batcher.generate([[4]], SEEDED, timeout=LONG)))
                self.asked.append(self.batcher.update_weights({}))
            return batch

    wrapper = Nested()
    wrapper.asked = []
    batcher = wrapper.batcher = DynamicBatcher(Backend.from_plugin(GatedEngine(), "gated", wrappers=[wrapper]))
    outer = batcher.backend if direct else batcher
    assert ids(outer.generate([[3]], SEEDED, timeout=LONG)) == [lone_answer([3])]
    assert wrapper.asked == [[lone_answer([4])], "1"]
    batcher.close()
