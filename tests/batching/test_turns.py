"""What needs the engine for itself: new weights, gradients, callbacks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from corelm import Backend, hookimpl
from corelm.backend.seeds import answer_seeds
from corelm.batching import DynamicBatcher
from corelm.errors import BackendTimeoutError, EngineError
from helpers.batching_fakes import LONG, SEEDED, Held, answer, batcher, can, hold_one, ids, rows_of, until


def test_new_weights_wait_for_what_came_before_and_rows_say_which_made_them():
    engine = Held(permits=0)
    with batcher(engine) as made, ThreadPoolExecutor(1) as pool:
        first = hold_one(engine, made)
        before = made.submit_generate([[4]], SEEDED)
        update = pool.submit(made.update_weights, {}, "new")
        until(lambda: made.state().queued >= 2)
        after = made.submit_generate([[5]], SEEDED)
        engine.free()
        assert update.result(LONG) == "new" and made.weight_version == "new"
        versions = [future.result(LONG).weight_versions for future in (first, before, after)]
    assert versions == [("0",), ("0",), ("new",)]
    assert [type(each).__name__ for each in engine.requests] == ["WeightUpdate"]
    assert [rows_of(call) for call in engine.calls] == [[[3]], [[4]], [[5]]]


def test_an_update_that_fails_lets_the_others_go_on():
    engine = Held()
    engine.updated = False
    with batcher(engine) as made:
        with pytest.raises(EngineError, match="not in force"):
            made.update_weights({})
        assert ids(made.generate([[5]], SEEDED)) and made.weight_version == "0"


def test_gradients_are_computed_on_their_callers_thread_in_turn():
    threads = []

    class Seen(Held):
        def _pass(self, request):
            threads.append(threading.current_thread())
            return super()._pass(request)

    engine = Seen(permits=0, **can())
    with batcher(engine) as made, ThreadPoolExecutor(1) as pool:
        first = hold_one(engine, made)
        mine = pool.submit(lambda: (threading.current_thread(), made.score_logprobs([[4, 5]], grad=True)))
        until(lambda: made.state().queued >= 1)
        later = made.submit_generate([[6]], SEEDED)
        alone = made.submit_score_logprobs([[4, 5]], grad=True)
        engine.free()
        thread, batch = mine.result(LONG)
        batch.logprobs.values.sum().backward()
        assert ids(first) and ids(later) and alone.result(LONG).logprobs.values.requires_grad
    assert threads[1] is thread and threads[0] is threads[2] is not thread


def test_a_turn_that_comes_too_late_is_a_timeout_and_blocks_nobody():
    engine = Held(permits=0, **can())
    with batcher(engine) as made:
        first = hold_one(engine, made)
        with pytest.raises(BackendTimeoutError):
            made.score_logprobs([[4, 5]], grad=True, timeout=0.01)
        engine.free()
        assert ids(first) and ids(made.generate([[4]], SEEDED))


def test_a_callback_may_ask_and_close():
    engine = Held(permits=0)
    made = DynamicBatcher(Backend.from_plugin(engine, "held"))
    first, seen = hold_one(engine, made), []

    def back(future):
        seen.append(ids(made.generate([[4]], SEEDED)))
        seen.append(made.update_weights({}))
        made.close()

    first.add_done_callback(back)
    threads = made.dispatcher.threads()
    engine.free()
    assert ids(first)
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert seen == [[answer([4], int(answer_seeds(7, [0])), 2, 1.0)], "1"] and made.closed


def test_a_wrapper_may_ask_again_from_within_a_turn():
    class Asking:
        batcher, asked = None, []

        @hookimpl(wrapper=True)
        def score_logprobs(self, request):
            batch = yield
            if request.grad:
                self.asked.append(self.batcher.score_logprobs([[1, 2, 3]]).scored.tolist())
            return batch

    wrapper = Asking()
    engine = Held(**can())
    engine.free()
    made = wrapper.batcher = DynamicBatcher(Backend.from_plugin(engine, "held", wrappers=[wrapper]))
    done = threading.Thread(target=made.score_logprobs, args=([[4, 5]],), kwargs={"grad": True}, daemon=True)
    done.start()
    done.join(LONG)
    assert not done.is_alive() and wrapper.asked == [[[False, True, True]]]
    made.close()
