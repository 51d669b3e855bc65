"""Requests share calls to the engine; each gets its own answer, sampled with its own parameters."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from corelm import Backend, hookimpl
from corelm.backend.arguments import answer_seeds
from corelm.batching import DynamicBatcher
from corelm.errors import BackendTimeoutError, InvalidRequestError
from helpers.batching_fakes import (
    LONG,
    SEEDED,
    GatedEngine,
    all_capabilities,
    answer,
    hold_one,
    ids,
    join_threads,
    lone_answer,
    open_batcher,
    rows_of,
    wait_until,
)
from helpers.each import each
from helpers.fakes import SHORT
from helpers.refusals import refused


def test_requests_with_equal_parameters_share_a_call_and_each_gets_its_own_answer():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        first = hold_one(engine, batcher)
        others = [batcher.submit_generate([[3, n], [4, n]], {**SHORT, "seed": n}) for n in range(5)]
        engine.release(2)
        for n, future in enumerate(others):
            seeds = answer_seeds(n, range(2)).tolist()
            assert ids(future) == [answer([3 + row, n], seeds[row], 2, 1.0) for row in range(2)]
        assert ids(first) == [lone_answer([3])]
    assert [len(call.prompts) for call in engine.calls] == [1, 10]
    assert engine.calls[1].sampling.seed is None and len({*engine.calls[1].request_ids}) == 10


def test_samples_stay_with_their_prompt():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = [batcher.submit_generate([[n], [n + 1]], {**SEEDED, "num_samples": 3}) for n in (4, 8)]
        engine.free()
        seeds = answer_seeds(7, range(2), 3).tolist()
        for n, future in zip((4, 8), futures, strict=True):
            assert ids(future) == [answer([n + i // 3], seeds[i], 2, 1.0) for i in range(6)]
    assert len(engine.calls) == 2


@each(
    "other", [{"temperature": 0.5}, {"max_new_tokens": 3}, {"stop": "7"}, {"stop_token_ids": [9]}, {"ignore_eos": True}]
)
def test_requests_with_different_parameters_do_not_share_a_call(other):
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        one, two = (batcher.submit_generate([[5]], {**SEEDED, **more}) for more in ({}, other))
        engine.free()
        assert ids(one) == [lone_answer([5])]
        assert ids(two) == [
            lone_answer([5], new=other.get("max_new_tokens", 2), temperature=other.get("temperature", 1.0))
        ]
    assert [len(call.prompts) for call in engine.calls] == [1, 1, 1]


def test_requests_with_and_without_costly_seeds_do_not_share_a_call():
    engine = GatedEngine(permits=0, seeds_are_costly=True)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = [batcher.submit_generate([[n]], sampling) for n, sampling in ((3, SEEDED), (4, SHORT), (5, SHORT))]
        engine.free()
        assert ids(futures[0]) == [lone_answer([3])]
        assert [ids(future) for future in futures[1:]] == [[answer([n], 0, 2, 1.0)] for n in (4, 5)]
    seeds = {len(call.prompts): call.seeds is None for call in engine.calls[1:]}
    assert seeds == {1: False, 2: True}


def test_requests_with_engine_kwargs_do_not_share_a_call():
    engine = GatedEngine(permits=0, sampling={"engine_kwargs": None})
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        # Python finds 1 and True equal, but an engine may tell them apart.
        futures = [batcher.submit_generate([[5]], {**SEEDED, "engine_kwargs": {"x": x}}) for x in (1, True)]
        engine.free()
        wait(futures, LONG)
    assert [call.sampling.engine_kwargs for call in engine.calls] == [{}, {"x": 1}, {"x": True}]


def test_requests_with_and_without_log_probs_make_two_calls_with_their_own_labels():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = {mode: batcher.submit_generate([[5]], SEEDED, logprobs=mode) for mode in ("none", "raw", "processed")}
        engine.free()
        batches = {mode: future.result(LONG) for mode, future in futures.items()}
    assert batches["none"].logprobs is None
    assert batches["raw"].mode == "raw" and batches["processed"].mode == "processed"
    assert len(engine.calls) == 3, "raw and processed log-probs at temperature 1 are equal and share a call"


def test_scoring_requests_share_a_call():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        one = batcher.submit_score_logprobs([[1, 2, 3], [4]], score_from=2)
        two = batcher.submit_score_logprobs([[5, 6]])
        engine.free()
        assert one.result(LONG).logprobs.tolist() == [[0.0, 0.0, -3.0], [0.0]]
        assert one.result().scored.tolist() == [[False, False, True], [False]]
        assert two.result(LONG).logprobs.tolist() == [[0.0, -6.0]]
    assert rows_of(engine.calls[1]) == [[1, 2, 3], [4], [5, 6]]


def test_scoring_requests_at_different_temperatures_make_separate_calls():
    engine = GatedEngine(permits=0, score_temperature=True)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        futures = {t: batcher.submit_score_logprobs([[5, 6]], temperature=t) for t in (1.0, 2.0, 0.5)}
        engine.free()
        for temperature, future in futures.items():
            batch = future.result(LONG)
            assert batch.temperature == temperature and batch.logprobs.tolist() == [[0.0, -6.0 / temperature]]
    assert len(engine.calls) == 4


def test_results_share_no_storage_and_requests_are_copied():
    engine = GatedEngine(permits=0)
    with open_batcher(engine) as batcher:
        hold_one(engine, batcher)
        mine = torch.tensor([[5, 6]])
        futures = [batcher.submit_generate(mine, SEEDED), batcher.submit_generate([[7]], SEEDED)]
        mine.fill_(9)
        engine.free()
        one, two = (future.result(LONG) for future in futures)
    assert rows_of(engine.calls[1]) == [[5, 6], [7]]
    assert one.ids.values.untyped_storage().data_ptr() != two.ids.values.untyped_storage().data_ptr()
    assert not one.ids.values.is_inference()


def test_a_batcher_can_be_used_like_its_backend():
    engine = GatedEngine()
    with open_batcher(engine) as batcher:
        assert isinstance(batcher, Backend) and batcher.name == "gated" and batcher.capabilities is engine.capabilities
        assert batcher.tokenize(["3a"]).ids.tolist() == [[3, 10]] and batcher.detokenize([[3, 10]]) == ["3a"]
        batch = batcher.generate([[1]], SHORT)
        assert batcher.provenance(batch).backend == "gated" and batcher.health() and batcher.pad_id == 0
        assert batcher.generate([], SHORT).finish_reasons == ()
        with refused(InvalidRequestError, field="backend"):
            DynamicBatcher(batcher)
    assert batcher.closed and batcher.backend.closed and not batcher.health()


def test_threads_that_switch_often_get_their_own_answers():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with open_batcher(GatedEngine(), max_batch_size=7) as batcher, ThreadPoolExecutor(16) as pool:
            asked = [([3 + n % 9, n % 5], n, 1.0 + n % 3 / 10) for n in range(400)]

            def ask(one):
                prompt, seed, temperature = one
                return ids(batcher.generate([prompt], {**SHORT, "seed": seed, "temperature": temperature}))

            for (prompt, seed, temperature), got in zip(asked, pool.map(ask, asked), strict=True):
                assert got == [lone_answer(prompt, seed, temperature=temperature)]
    finally:
        sys.setswitchinterval(before)


def test_an_engine_with_concurrent_calls_gets_each_request_alone_up_to_max_batch_size():
    engine = GatedEngine(permits=0, **all_capabilities(concurrent_calls=True))
    with open_batcher(engine, max_batch_size=5) as batcher:
        futures = [batcher.submit_generate([[3 + n % 9]], {**SHORT, "seed": n}) for n in range(12)]
        engine.wait_for(lambda: engine.inside == 5)
        assert batcher.state().in_flight == 5 and batcher.state().queued == 7
        assert futures[-1].cancel() and batcher.state().queued == 6
        engine.free()
        for n, future in enumerate(futures[:-1]):
            assert ids(future) == [lone_answer([3 + n % 9], n)]
    assert engine.most_inside == 5 and len(engine.calls) == 11
    assert all(len(call.prompts) == 1 for call in engine.calls)


def test_an_update_is_alone_in_an_engine_with_concurrent_calls():
    engine = GatedEngine(permits=0, **all_capabilities(concurrent_calls=True))
    with open_batcher(engine) as batcher, ThreadPoolExecutor(1) as pool:
        before = [batcher.submit_generate([[n]], SEEDED) for n in (4, 5)]
        engine.wait_for(lambda: engine.inside == 2)
        update = pool.submit(batcher.update_weights, {}, "new")
        wait_until(lambda: batcher.state().queued >= 1)
        after = batcher.submit_generate([[6]], SEEDED)
        engine.free()
        assert update.result(LONG) == "new"
        assert [future.result(LONG).weight_versions[0] for future in (*before, after)] == ["0", "0", "new"]


def test_an_update_without_drain_does_not_wait_in_the_queue():
    engine = GatedEngine(permits=0, **all_capabilities(concurrent_calls=True))
    with open_batcher(engine, max_batch_size=1) as batcher:
        running = hold_one(engine, batcher)
        queued = batcher.submit_generate([[4]], SEEDED)
        batcher.update_weights({}, "new", when="abort")
        engine.free()
        assert running.result(LONG).finish_reasons == ("abort",)
        assert queued.result(LONG).weight_versions == ("new",)


# Calls that need the engine to themselves, and calls made by callbacks and wrappers -----------------------------------


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
