"""Requests share calls to the engine, each gets its own answer, and nobody another's parameters."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from corelm import Backend
from corelm.backend.seeds import answer_seeds
from corelm.batching import DynamicBatcher
from corelm.errors import InvalidRequestError
from helpers.batching_fakes import LONG, SEEDED, Held, answer, batcher, can, hold_one, ids, rows_of, until
from helpers.fakes import SHORT

# Sharing --------------------------------------------------------------------------------------------------------------


def test_requests_with_equal_parameters_share_a_call_and_each_gets_its_own_answer():
    engine = Held(permits=0)
    with batcher(engine) as made:
        first = hold_one(engine, made)
        others = [made.submit_generate([[3, n], [4, n]], {**SHORT, "seed": n}) for n in range(5)]
        engine.release(2)
        for n, future in enumerate(others):
            seeds = answer_seeds(n, range(2)).tolist()
            assert ids(future) == [answer([3 + row, n], seeds[row], 2, 1.0) for row in range(2)]
        assert ids(first) == [answer([3], int(answer_seeds(7, [0])), 2, 1.0)]
    assert [len(call.prompts) for call in engine.calls] == [1, 10]
    assert engine.calls[1].sampling.seed is None and len({*engine.calls[1].request_ids}) == 10


def test_samples_stay_with_their_prompt():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[n], [n + 1]], {**SEEDED, "num_samples": 3}) for n in (4, 8)]
        engine.free()
        seeds = answer_seeds(7, range(2), 3).tolist()
        for n, future in zip((4, 8), futures, strict=True):
            assert ids(future) == [answer([n + i // 3], seeds[i], 2, 1.0) for i in range(6)]
    assert len(engine.calls) == 2


@pytest.mark.parametrize(
    "other",
    [{"temperature": 0.5}, {"max_new_tokens": 3}, {"stop": "7"}, {"stop_token_ids": [9]}, {"ignore_eos": True}],
)
def test_another_callers_parameters_are_never_applied(other):
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        one, two = (made.submit_generate([[5]], {**SEEDED, **more}) for more in ({}, other))
        engine.free()
        seed = int(answer_seeds(7, [0]))
        assert ids(one) == [answer([5], seed, 2, 1.0)]
        assert ids(two) == [answer([5], seed, other.get("max_new_tokens", 2), other.get("temperature", 1.0))]
    assert [len(call.prompts) for call in engine.calls] == [1, 1, 1]


def test_engine_arguments_are_nobody_elses():
    engine = Held(permits=0, sampling={"engine_kwargs": None})
    with batcher(engine) as made:
        hold_one(engine, made)
        # Equal for Python, and two things for an engine.
        futures = [made.submit_generate([[5]], {**SEEDED, "engine_kwargs": {"x": x}}) for x in (1, True)]
        engine.free()
        wait(futures, LONG)
    assert [call.sampling.engine_kwargs for call in engine.calls] == [{}, {"x": 1}, {"x": True}]


def test_log_probs_wanted_and_not_wanted_are_two_calls_and_both_are_labelled():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = {mode: made.submit_generate([[5]], SEEDED, logprobs=mode) for mode in ("none", "raw", "processed")}
        engine.free()
        batches = {mode: future.result(LONG) for mode, future in futures.items()}
    assert batches["none"].logprobs is None
    assert batches["raw"].mode == "raw" and batches["processed"].mode == "processed"
    assert len(engine.calls) == 3, "at temperature 1 raw and processed are the same numbers, and share a call"


def test_scores_share_a_call_too():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        one = made.submit_score_logprobs([[1, 2, 3], [4]], score_from=2)
        two = made.submit_score_logprobs([[5, 6]])
        engine.free()
        assert one.result(LONG).logprobs.tolist() == [[0.0, 0.0, -3.0], [0.0]]
        assert one.result().scored.tolist() == [[False, False, True], [False]]
        assert two.result(LONG).logprobs.tolist() == [[0.0, -6.0]]
    assert rows_of(engine.calls[1]) == [[1, 2, 3], [4], [5, 6]]


def test_scores_at_different_temperatures_are_different_calls():
    engine = Held(permits=0, score_temperature=True)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = {t: made.submit_score_logprobs([[5, 6]], temperature=t) for t in (1.0, 2.0, 0.5)}
        engine.free()
        for temperature, future in futures.items():
            batch = future.result(LONG)
            assert batch.temperature == temperature and batch.logprobs.tolist() == [[0.0, -6.0 / temperature]]
    assert len(engine.calls) == 4


def test_a_result_owns_its_storage_and_a_request_is_a_copy():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        mine = torch.tensor([[5, 6]])
        futures = [made.submit_generate(mine, SEEDED), made.submit_generate([[7]], SEEDED)]
        mine.fill_(9)
        engine.free()
        one, two = (future.result(LONG) for future in futures)
    assert rows_of(engine.calls[1]) == [[5, 6], [7]]
    assert one.ids.values.untyped_storage().data_ptr() != two.ids.values.untyped_storage().data_ptr()
    assert not one.ids.values.is_inference()


def test_it_has_the_facade_of_its_backend():
    engine = Held()
    with batcher(engine) as made:
        assert isinstance(made, Backend) and made.name == "held" and made.capabilities is engine.capabilities
        assert made.tokenize(["3a"]).ids.tolist() == [[3, 10]] and made.detokenize([[3, 10]]) == ["3a"]
        batch = made.generate([[1]], SHORT)
        assert made.provenance(batch).backend == "held" and made.health() and made.pad_id == 0
        assert made.generate([], SHORT).finish_reasons == ()
        with pytest.raises(InvalidRequestError, match="not batched"):
            DynamicBatcher(made)
    assert made.closed and made.backend.closed and not made.health()


def test_many_threads_with_little_time_each():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with batcher(Held(), max_batch_size=7) as made, ThreadPoolExecutor(16) as pool:
            asked = [([3 + n % 9, n % 5], n, 1.0 + n % 3 / 10) for n in range(400)]

            def ask(one):
                prompt, seed, temperature = one
                return ids(made.generate([prompt], {**SHORT, "seed": seed, "temperature": temperature}))

            for (prompt, seed, temperature), got in zip(asked, pool.map(ask, asked), strict=True):
                assert got == [answer(prompt, int(answer_seeds(seed, [0])), 2, temperature)]
    finally:
        sys.setswitchinterval(before)


# Engines that batch by themselves -------------------------------------------------------------------------------------


def test_an_engine_with_batching_of_its_own_is_called_directly_with_a_bound():
    engine = Held(permits=0, **can(concurrent_calls=True))
    with batcher(engine, max_batch_size=5) as made:
        futures = [made.submit_generate([[3 + n % 9]], {**SHORT, "seed": n}) for n in range(12)]
        engine.wait_for(lambda: engine.inside == 5)
        assert made.state().in_flight == 5 and made.state().queued == 7
        assert futures[-1].cancel() and made.state().queued == 6
        engine.free()
        for n, future in enumerate(futures[:-1]):
            assert ids(future) == [answer([3 + n % 9], int(answer_seeds(n, [0])), 2, 1.0)]
    assert engine.most_inside == 5 and len(engine.calls) == 11
    assert all(len(call.prompts) == 1 for call in engine.calls)


def test_there_an_update_is_alone_in_the_engine():
    engine = Held(permits=0, **can(concurrent_calls=True))
    with batcher(engine) as made, ThreadPoolExecutor(1) as pool:
        before = [made.submit_generate([[n]], SEEDED) for n in (4, 5)]
        engine.wait_for(lambda: engine.inside == 2)
        update = pool.submit(made.update_weights, {}, "new")
        until(lambda: made.state().queued >= 1)
        after = made.submit_generate([[6]], SEEDED)
        engine.free()
        assert update.result(LONG) == "new"
        assert [future.result(LONG).weight_versions[0] for future in (*before, after)] == ["0", "0", "new"]


def test_there_an_update_that_does_not_drain_does_not_queue():
    engine = Held(permits=0, **can(concurrent_calls=True))
    with batcher(engine, max_batch_size=1) as made:
        running = hold_one(engine, made)
        queued = made.submit_generate([[4]], SEEDED)
        made.update_weights({}, "new", drain=False)
        engine.free()
        assert running.result(LONG).finish_reasons == ("abort",)
        assert queued.result(LONG).weight_versions == ("new",)
