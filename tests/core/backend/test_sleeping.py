"""An engine that sleeps: what is refused meanwhile, what it wakes with, and what happens if it fails to."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from corelm import Backend, DynamicBatcher, get_backend, hookimpl
from corelm.errors import BackendAsleepError, CapabilityError, InvalidRequestError, StaleWeightsError
from corelm.spec import WakeRequest
from corelm_testing.toy import Bigram, ToyBackend
from helpers.capable_plugins import Abortable, Sleeper
from helpers.insides import a_call_waits
from helpers.processes import wait_until
from helpers.refusals import refused

ROWS = [[10, 20, 30], [40, 50]]


@pytest.fixture
def watch() -> Any:
    """Return what gives a backend a canary; skip the test where there is none."""
    return pytest.importorskip("corelm_fleet.canary").watch


def sleeper(kind: type[ToyBackend] = Sleeper) -> Backend:
    return Backend.from_plugin(kind.open(Bigram.of_talk()), "toy")


@pytest.fixture
def backend() -> Iterator[Backend]:
    with sleeper() as opened:
        yield opened


def scores(backend: Backend) -> list[list[float]]:
    return backend.score_logprobs(ROWS).logprobs.tolist()


def test_what_a_sleeping_engine_cannot_do_is_refused_and_says_what_to_call(backend: Backend) -> None:
    backend.sleep()
    with pytest.raises(BackendAsleepError, match=r"its weights and KV cache sleep; call backend\.wake\(\) first"):
        backend.generate(ROWS)
    with pytest.raises(BackendAsleepError, match=r"call backend\.wake\(\['weights'\]\) first"):
        backend.update_weights(Bigram.of_talk().state_dict())
    backend.wake("weights")
    with pytest.raises(BackendAsleepError):
        backend.score_logprobs(ROWS)
    assert backend.health() and backend.detokenize([[104]]) == ["h"]


@pytest.mark.parametrize("tags", [None, ["weights", "kv_cache"], ("kv_cache", "weights")])
def test_waking_brings_the_same_weights_under_the_same_label(backend: Backend, tags: Any) -> None:
    before = scores(backend)
    for _ in range(2):
        backend.sleep(1)
        backend.wake(tags)
        assert scores(backend) == before and backend.weight_version == "0"


@pytest.mark.parametrize("at", ["before the sleep", "between the halves of waking"])
def test_a_change_by_the_owner_is_noticed(backend: Backend, at: str) -> None:
    def change(now: str) -> None:
        if now == at:
            with torch.no_grad():
                backend.engine.plugin.model.table.mul_(2)

    scores(backend)
    change("before the sleep")
    backend.sleep()
    backend.wake("weights")
    change("between the halves of waking")
    backend.wake("kv_cache")
    assert backend.weight_version == "1"


def test_an_engine_opened_without_weights_waits_for_an_update(watch: Any) -> None:
    class Dummy(ToyBackend):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.capabilities = replace(self.capabilities, without_weights=True)

    with sleeper(Dummy) as backend:
        watch(backend)
        with pytest.raises(BackendAsleepError):
            scores(backend)
        other = {"table": torch.randn(260, 260, generator=torch.Generator().manual_seed(4))}
        with sleeper() as elsewhere:
            expect = watch(elsewhere).scores
        with pytest.raises(StaleWeightsError):
            backend.update_weights(other, expect=expect)
        backend.update_weights(Bigram.of_talk().state_dict(), expect=expect)
        assert scores(backend)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda each: each.sleep(0), "level"),
        (lambda each: each.sleep(True), "level"),
        (lambda each: each.sleep(when="now"), "when"),
        (lambda each: each.wake("weight"), "tags"),
        (lambda each: each.wake([]), "tags"),
        (lambda each: each.wake(3), "tags"),
        (lambda each: each.wake([["weights"]]), "tags"),
    ],
)
def test_a_bad_argument_is_refused(backend: Backend, call: Callable[[Backend], None], field: str) -> None:
    with refused(InvalidRequestError, field=field):
        call(backend)
    assert scores(backend)


def test_a_level_that_the_engine_lacks_is_refused() -> None:
    class Shallow(Sleeper):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.capabilities = replace(self.capabilities, sleep_levels=frozenset({2}))

    with sleeper(Shallow) as backend, refused(InvalidRequestError, field="level"):
        backend.sleep(1)
    with get_backend("toy") as backend, refused(CapabilityError, capability="sleep_levels"):
        backend.sleep()


def test_the_canary_asks_when_all_is_awake(backend: Backend, watch: Any) -> None:
    watch(backend)
    backend.sleep()
    kept = backend.engine.plugin.kept
    backend.wake("kv_cache")
    backend.engine.plugin.kept = kept.flip(0)
    with pytest.raises(StaleWeightsError):
        backend.wake("weights")
    assert backend.weight_version != "0"


def test_the_canary_compares_an_update_made_while_the_cache_slept(backend: Backend, watch: Any) -> None:
    watch(backend)
    other, unlike = (torch.randn(260, 260, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    with sleeper() as elsewhere:
        elsewhere.update_weights({"table": other})
        expect = watch(elsewhere).scores
    for given in (other, unlike):
        backend.sleep(2)
        backend.wake("weights")
        backend.update_weights({"table": given}, expect=expect)
        if given is other:
            backend.wake()
        else:
            with pytest.raises(StaleWeightsError):
                backend.wake()
    assert scores(backend)


def test_a_batcher_answers_what_came_before_the_sleep() -> None:
    with sleeper() as inner, DynamicBatcher(inner) as batcher:
        before = [batcher.submit_score_logprobs(ROWS) for _ in range(20)]
        batcher.sleep()
        assert all(future.result().logprobs.tolist() for future in before)
        with pytest.raises(BackendAsleepError):
            batcher.score_logprobs(ROWS)
        batcher.wake()
        assert batcher.score_logprobs(ROWS).logprobs.tolist() == before[0].result().logprobs.tolist()


def test_sleep_without_draining_aborts_answers_and_keeps_what_they_have() -> None:
    class Both(Abortable, Sleeper):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.capabilities = replace(self.capabilities, sleep_levels=frozenset({1, 2}))

    with sleeper(Both) as backend:
        future = backend.submit_generate(ROWS[:1], {"max_new_tokens": 300, "ignore_eos": True})
        while not backend.engine.lock.holders:
            pass
        backend.sleep(when="abort")
        assert future.result().finish_reasons == ("abort",)
        backend.wake()
        assert scores(backend)


def test_two_threads_that_wake_it_wake_it_once() -> None:
    class Watched(Sleeper):
        asked = 0

        @hookimpl
        def wake(self, request: WakeRequest) -> bool:
            self.asked += 1
            if self.asked == 1:
                other.start()
                assert wait_until(lambda: a_call_waits(backend))
            return super().wake(request)

    with sleeper(Watched) as backend:
        other = threading.Thread(target=lambda: backend.wake())
        backend.sleep()
        backend.wake()
        other.join()
        assert backend.engine.plugin.asked == 1 and scores(backend)
