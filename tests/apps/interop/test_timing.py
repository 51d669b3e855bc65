"""`Timing`: every figure against clocks and counts of the test and of the engine itself."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import Backend, hookimpl
from corelm.batching import DynamicBatcher
from corelm.errors import EngineError
from corelm_interop import Timing
from corelm_testing.toy import ToyBackend
from helpers.batching_fakes import LONG, SEEDED, GatedEngine, all_capabilities
from helpers.fakes import SHORT, Fake
from helpers.streaming_fakes import Dripping

pytestmark = pytest.mark.usefixtures("sound")

#: What clocks that are read one after the other may differ by in rounding.
NEAR = 1e-6


class Clocked(Fake):
    """Writes down when it is in `generate`."""

    def __init__(self, **capabilities: Any) -> None:
        super().__init__(**capabilities)
        self.times: list[tuple[float, float]] = []

    @hookimpl
    def generate(self, request: Any) -> Any:
        began = time.monotonic()
        total = torch.zeros(())
        for _ in range(2000):  # work that a clock can see
            total = total + 1
        result = Fake.generate(self, request)
        self.times.append((began, time.monotonic()))
        return result


def test_rows_tokens_rates_and_durations_are_those_of_the_engine() -> None:
    timing, engine = Timing(), Clocked()
    backend = Backend.from_plugin(engine, "clocked", wrappers=[timing])
    before = time.monotonic()
    backend.generate([[1, 2, 3], [4]], SHORT)
    backend.generate([[5]], {"max_new_tokens": 3})
    backend.score_logprobs([[1, 2, 3, 4]])
    after = time.monotonic()
    summary = timing.summary()
    assert list(summary.hooks) == ["generate", "score_logprobs"]
    made = summary.hooks["generate"]
    assert (made.calls, made.failures, made.retries, made.rows, made.failed_rows) == (2, 0, 0, 3, 0)
    assert (made.given_tokens, made.sampled_tokens) == (5, 2 + 2 + 3)
    assert made.cached_tokens is None and made.cache_hits is None and made.first_token is None
    inside = [end - begin for begin, end in engine.times]
    assert sum(inside) - NEAR <= made.busy <= after - before
    assert made.duration.count == 2 and min(inside) - NEAR <= made.duration.least <= made.duration.most
    assert made.duration.mean * 2 == pytest.approx(made.busy)
    assert made.sampled_per_second == pytest.approx(7 / made.busy)
    assert made.given_per_second == pytest.approx(5 / made.busy)
    assert (made.rows_per_call.least, made.rows_per_call.most) == (1, 2)
    scored = summary.hooks["score_logprobs"]
    assert (scored.calls, scored.rows, scored.given_tokens, scored.sampled_tokens) == (1, 1, 4, 0)


def test_calls_at_the_same_time_count_once_in_the_busy_time() -> None:
    timing, engine = Timing(), GatedEngine(permits=0, concurrent_calls=True)
    backend = Backend.from_plugin(engine, "gated", wrappers=[timing])
    with ThreadPoolExecutor(4) as pool:
        began = time.monotonic()
        calls = [pool.submit(backend.generate, [[3]], SEEDED) for _ in range(4)]
        engine.wait_for_calls(4)
        threading.Event().wait(0.05)
        half = timing.summary().hooks["generate"]
        engine.free()
        for call in calls:
            call.result(LONG)
        ended = time.monotonic()
    assert half.calls == 0 and 0.05 <= half.busy <= ended - began
    made = timing.summary().hooks["generate"]
    assert made.calls == 4 and made.busy <= ended - began < made.duration.mean * 4


@pytest.mark.parametrize("how", ["lock", "batcher", "full queue"])
def test_the_wait_is_that_for_the_lock_or_for_the_batcher(how: str) -> None:
    timing, engine = Timing(), GatedEngine(permits=0)
    backend = Backend.from_plugin(engine, "gated", wrappers=[timing])
    if how != "lock":
        limits = corelm.batching.Limits(max_batch_size=1, max_queue=1) if how == "full queue" else None
        backend = DynamicBatcher(backend, limits)
    with backend, ThreadPoolExecutor(2) as pool:
        first = pool.submit(backend.generate, [[3]], SEEDED)
        engine.wait_for_calls(1)
        before = time.monotonic()
        others = [backend.submit_generate([[4]], SEEDED)]
        if how == "full queue":
            # With room for one request in the queue, this thread waits for room.
            others.append(pool.submit(backend.generate, [[5]], SEEDED))
        after = time.monotonic()
        threading.Event().wait(0.05)
        released = time.monotonic()
        engine.free()
        for call in [first, *others]:
            call.result(LONG)
        ended = time.monotonic()
    wait = timing.summary().hooks["generate"].wait
    assert wait.count == 1 + len(others)
    assert 0 <= wait.least < wait.most <= ended - before
    assert wait.most >= released - after


def test_a_shared_call_has_the_wait_of_each_of_its_users() -> None:
    timing, engine = Timing(), GatedEngine(permits=0)
    with DynamicBatcher(Backend.from_plugin(engine, "gated", wrappers=[timing])) as batcher:
        first = batcher.submit_generate([[3]], SEEDED)
        engine.wait_for_calls(1)
        others = [batcher.submit_generate([[n], [4]], SEEDED) for n in range(5)]
        engine.free()
        for future in [first, *others]:
            future.result(LONG)
    made = timing.summary().hooks["generate"]
    assert (made.calls, made.rows, made.wait.count) == (2, 11, 6)
    assert made.rows_per_call.most == 10


def test_the_first_token_is_that_of_a_reader_and_absent_otherwise() -> None:
    timing, engine = Timing(), Dripping(0)
    backend = Backend.from_plugin(engine, "dripping", wrappers=[timing])
    asked = time.monotonic()
    with backend.stream([[3], [10]], {"max_new_tokens": 3, "ignore_eos": True}) as stream:
        engine.wait_for_calls(1)
        threading.Event().wait(0.03)
        first_allowed = time.monotonic()
        engine.allow(1)
        next(stream), next(stream)
        first_read = time.monotonic()
        threading.Event().wait(0.03)
        more_allowed = time.monotonic()
        engine.allow(2)
        list(stream)
    ended = time.monotonic()
    made = timing.summary().hooks["generate"]
    assert made.first_token.count == made.token_interval.count == 2
    assert 0.03 <= made.first_token.least <= made.first_token.most <= first_read - asked
    # Two tokens came after the first, no sooner than they were allowed.
    assert (more_allowed - first_read) / 2 <= made.token_interval.least
    assert made.token_interval.most <= (ended - first_allowed) / 2
    timing.reset()
    engine.allow(None)
    backend.generate([[3]], SHORT)
    assert timing.summary().hooks["generate"].first_token is None


@pytest.mark.parametrize("batched", [False, True])
def test_each_reader_of_a_shared_call_has_its_own_first_tokens(batched: bool) -> None:
    timing, engine = Timing(), Dripping(None)
    backend = Backend.from_plugin(engine, "dripping", wrappers=[timing])
    with DynamicBatcher(backend) if batched else backend as opened, ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda n: list(opened.stream([[n], [n]], SHORT)), range(3, 6)))
        opened.generate([[7]], SHORT)
    assert timing.summary().hooks["generate"].first_token.count == 6


def test_failures_and_retries_are_counted_by_their_class() -> None:
    timing, left = Timing(), [OSError("lost"), ValueError("odd")]

    def bend(result: Any) -> Any:
        if left:
            raise left.pop()
        return result

    backend = Backend.from_plugin(Fake(bend), "fake", wrappers=[timing], retry=3)
    backend.generate([[1]], SHORT)
    made = timing.summary().hooks["generate"]
    assert (made.calls, made.failures, made.retries, made.rows) == (3, 2, 2, 1)
    assert made.errors == {"OSError": 1, "ValueError": 1}
    # The pauses between the attempts are no wait for the engine.
    assert made.wait.count == 1


def test_a_shared_call_that_is_asked_again_in_halves_is_counted_as_made_again() -> None:
    timing, engine = Timing(), GatedEngine(permits=0, **all_capabilities())
    with DynamicBatcher(Backend.from_plugin(engine, "gated", wrappers=[timing])) as batcher:
        first = batcher.submit_generate([[3]], SEEDED)
        engine.wait_for_calls(1)
        good, bad = batcher.submit_generate([[4]], SEEDED), batcher.submit_generate([[13]], SEEDED)
        engine.free()
        first.result(LONG), good.result(LONG)
        with pytest.raises(EngineError):
            bad.result(LONG)
    made = timing.summary().hooks["generate"]
    assert (made.calls, made.failures, made.retries, made.rows, made.wait.count) == (4, 2, 2, 2, 3)


def test_more_classes_of_errors_than_twenty_are_counted_together() -> None:
    timing, count = Timing(), 25
    classes = [type(f"Odd{n}", (Exception,), {}) for n in range(count)]

    def bend(result: Any) -> Any:
        raise classes.pop()("no")

    backend = Backend.from_plugin(Fake(bend), "fake", wrappers=[timing])
    for _ in range(count):
        with pytest.raises(EngineError):
            backend.generate([[1]], SHORT)
    errors = timing.summary().hooks["generate"].errors
    assert len(errors) == 21 and errors["others"] == 5 and sum(errors.values()) == count


def test_weights_tokenizing_and_containers_are_hooks_of_their_own() -> None:
    timing = Timing()
    with corelm.get_backend("toy", wrappers=[timing]) as backend:
        backend.update_weights({"table": backend.engine.plugin.model.table + 1})
        policy = corelm.LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 4})
        policy(TensorDict(text=["Hi", "there"]), seed=1)
    hooks = timing.summary().hooks
    assert hooks["update_weights"].calls == 1
    assert hooks["tokenize"].rows == hooks["generate"].rows == 2
    assert hooks["to_containers"].calls == 1


def test_reset_returns_what_there_was_and_a_call_under_way_counts_when_it_ends() -> None:
    timing, engine = Timing(), GatedEngine(permits=0)
    backend = Backend.from_plugin(engine, "gated", wrappers=[timing])
    began = time.monotonic()
    call = backend.submit_generate([[3]], SEEDED)
    engine.wait_for_calls(1)
    threading.Event().wait(0.02)
    first = timing.reset()
    middle = time.monotonic()
    engine.free()
    call.result(LONG)
    after = timing.summary()
    assert first.hooks["generate"].calls == 0 and first.hooks["generate"].busy >= 0.02
    made = after.hooks["generate"]
    assert made.calls == 1 and made.duration.most >= 0.02
    assert made.busy <= time.monotonic() - middle + NEAR and after.seconds <= time.monotonic() - began
    timing.reset()
    assert timing.summary().hooks == {}


def test_one_timing_adds_up_the_engines_that_it_is_given_to() -> None:
    timing = Timing()
    for name in ("one", "two"):
        Backend.from_plugin(Fake(), name, wrappers=[timing]).generate([[1]], SHORT)
    assert timing.summary().hooks["generate"].rows == 2


def test_many_threads_lose_no_count() -> None:
    timing = Timing()
    backend = Backend.from_plugin(Fake(concurrent_calls=True), "fake", wrappers=[timing])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: backend.generate([[1, 3]], SHORT), range(200)))
    made = timing.summary().hooks["generate"]
    assert (made.calls, made.rows, made.given_tokens, made.sampled_tokens) == (200, 200, 400, 400)
    assert made.duration.count == made.wait.count == 200


def test_the_summary_can_be_read_and_is_json() -> None:
    timing = Timing()
    backend = Backend.from_plugin(ToyBackend.open(), "toy", wrappers=[timing])
    backend.generate(backend.tokenize(["Hello"]).ids, {"max_new_tokens": 4, "seed": 1, "ignore_eos": True})
    text = repr(timing.summary())
    given = len(backend.tokenize(["Hello"]).ids.values)
    assert "generate: 1 call, 1 row; busy for" in text
    assert f"given          {given} tokens" in text and "sampled        4 tokens" in text
    assert text.startswith("2 hooks called in ") and "duration       median" in text
    told = json.loads(json.dumps(timing.summary().to_dict()))
    assert told["hooks"]["generate"]["sampled_tokens"] == 4
    assert set(told["hooks"]["generate"]["duration"]) == {"count", "mean", "least", "median", "p90", "p99", "most"}
    assert repr(Timing().summary()).startswith("0 hooks called in ")
