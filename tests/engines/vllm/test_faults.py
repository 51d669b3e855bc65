"""Engines that die or fail for good: every caller is told in time, and nobody gets another's answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from corelm import Backend
from corelm.errors import BackendClosedError, BackendTimeoutError, CapabilityError, EngineError
from helpers.tiny_models import CONTEXT, random_rows, tiny_model
from vllm_backend import VLLMBackend
from vllm_backend.sync import SyncEngine

Open = Callable[..., Backend]
PROMPTS = random_rows(4, 5, 6)
LONG = {"max_new_tokens": CONTEXT - 8, "ignore_eos": True}
#: Seconds that anything may take on a busy machine.
PATIENCE = 120.0


@pytest.fixture
def before() -> tuple[set[int | None], set[threading.Thread]]:
    """The processes and threads there are."""
    return {child.pid for child in multiprocessing.active_children()}, {*threading.enumerate()}


def in_flight(backend: Backend, count: int) -> None:
    """Wait until so many requests are."""
    end = time.monotonic() + PATIENCE
    while backend.engine.plugin.engine.llm.get_num_unfinished_requests() < count:
        assert time.monotonic() < end
        threading.Event().wait(0.005)


# A process of its own -------------------------------------------------------------------------------------------------


def test_an_engine_that_is_killed_fails_all_its_callers(
    open_vllm: Open, before: tuple[set[int | None], set[threading.Thread]]
) -> None:
    backend = open_vllm()
    (pid,) = {child.pid for child in multiprocessing.active_children()} - before[0]
    assert pid is not None
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(backend.generate, PROMPTS, LONG, logprobs="none") for _ in range(4)]
        in_flight(backend, 12)
        os.kill(pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(EngineError, match="open the backend again") as caught:
                call.result(PATIENCE)
            assert caught.value.usable is False
    assert not backend.health()
    with pytest.raises(EngineError) as caught:
        backend.score_logprobs(PROMPTS)
    assert caught.value.usable is False
    with pytest.raises(EngineError):
        backend.update_weights(tiny_model(hidden_size=128).state_dict())
    backend.close()
    assert nothing_new_since(before)


def test_a_closed_engine_leaves_nothing_behind_and_answers_nobody(
    open_vllm: Open, before: tuple[set[int | None], set[threading.Thread]]
) -> None:
    backend = open_vllm()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(backend.generate, PROMPTS, LONG, logprobs="none")
        in_flight(backend, 3)
        backend.close()
        with pytest.raises(BackendClosedError):
            call.result(PATIENCE)
    assert nothing_new_since(before)
    # And once more in the same process, where the first may have left its mark.
    with open_vllm() as again:
        assert again.generate(PROMPTS, {"max_new_tokens": 3, "ignore_eos": True}).ids.lengths.tolist() == [3, 3, 3]
    assert nothing_new_since(before)


def nothing_new_since(before: tuple[set[int | None], set[threading.Thread]]) -> bool:
    processes = {child.pid for child in multiprocessing.active_children()} - before[0]
    # tqdm keeps one thread for all progress bars there ever are.
    threads = {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"} - before[1]
    return not processes and not threads


# In this process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sync(open_vllm: Open) -> Iterator[tuple[Backend, SyncEngine]]:
    with open_vllm(engine="sync") as backend:
        plugin = backend.engine.plugin
        assert isinstance(plugin, VLLMBackend) and isinstance(plugin.engine, SyncEngine)
        yield backend, plugin.engine


def test_a_step_that_fails_gives_nobody_another_callers_answer(sync: tuple[Backend, SyncEngine]) -> None:
    backend, engine = sync
    step = engine.llm.step

    def fail() -> Any:
        engine.llm.step = step
        raise ArithmeticError("inside a step")

    backend.generate(PROMPTS, LONG, logprobs="none")
    engine.llm.step = fail
    with pytest.raises(EngineError, match="inside a step") as caught:
        backend.generate(PROMPTS, LONG, logprobs="none")
    assert caught.value.usable is False and not backend.health()
    for _ in range(2):
        with pytest.raises(EngineError, match="open the backend again"):
            backend.generate([[5, 6, 7]], {"max_new_tokens": 2}, logprobs="none")
    # The answers to the call that failed are still in there, and vLLM would hand them to whoever steps next.
    stale = []
    while engine.llm.has_unfinished_requests():
        stale += engine._owner.submit(step).result(PATIENCE)
    assert len(stale) == len(PROMPTS)


def test_a_call_that_takes_too_long_is_forgotten(sync: tuple[Backend, SyncEngine]) -> None:
    backend, engine = sync
    with pytest.raises(BackendTimeoutError, match=r"within 0\.\d+ seconds"):
        backend.generate(PROMPTS, LONG, logprobs="none", timeout=0.02)
    batch = backend.generate(PROMPTS[:1], {"max_new_tokens": 3, "ignore_eos": True}, logprobs="none")
    assert batch.ids.lengths.tolist() == [3] and not engine.llm.has_unfinished_requests()


def test_a_refused_row_fails_alone(sync: tuple[Backend, SyncEngine]) -> None:
    backend, _ = sync
    prompts = random_rows(5, CONTEXT - 10, 7)
    sampling = {"max_new_tokens": None, "min_new_tokens": 40, "stop": ["e"]}
    batch = backend.generate(prompts, sampling, on_error="skip")
    assert batch.finish_reasons[1] == "error" and batch.ids.lengths[1] == 0
    assert bool((batch.ids.lengths[[0, 2]] >= 40).all())


def test_many_threads_take_turns(sync: tuple[Backend, SyncEngine]) -> None:
    backend, _ = sync
    prompts = random_rows(*range(1, 17))
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    alone = [backend.generate([prompt], sampling).ids.tolist()[0] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = pool.map(lambda prompt: backend.generate([prompt], sampling).ids.tolist()[0], prompts)
        assert list(together) == alone


def test_there_is_room_for_one_of_them(sync: tuple[Backend, SyncEngine], open_vllm: Open) -> None:
    with pytest.raises(CapabilityError, match="one engine in a process"):
        open_vllm(engine="sync")
    assert sync[0].health()
    with pytest.raises(CapabilityError):
        sync[0].abort(["a"])


def test_one_that_is_closed_makes_room(open_vllm: Open, before: tuple[set[int | None], set[threading.Thread]]) -> None:
    for _ in range(3):
        with open_vllm(engine="sync") as backend:
            assert backend.generate(PROMPTS, {"max_new_tokens": 2}, logprobs="none").errors is None
        with pytest.raises(BackendClosedError):
            backend.generate(PROMPTS, {"max_new_tokens": 2}, logprobs="none")
    assert nothing_new_since(before)
