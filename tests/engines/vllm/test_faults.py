"""Engines that die or fail for good: every caller gets an error in time, and never the answer of another call."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from corelm import Backend
from corelm.errors import BackendClosedError, BackendTimeoutError, CapabilityError, EngineError
from engines.vllm import failing_processor
from engines.vllm.conftest import SMALL
from engines.vllm.engine_access import sync_engine, unfinished_requests
from helpers.processes import children, read_line, runs, wait_until
from helpers.tiny_models import CONTEXT, random_rows, tiny_model

Open = Callable[..., Backend]
#: Returns the child processes and threads that were not there when the test began.
Leftovers = Callable[[], set[Any]]

PROMPTS = random_rows(4, 5, 6)
LONG = {"max_new_tokens": CONTEXT - 8, "ignore_eos": True}
#: Seconds that a call may take on a busy machine.
TIMEOUT = 120.0


def processes_and_threads() -> set[Any]:
    # tqdm keeps one thread for all progress bars of the process.
    threads = {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}
    return {child.pid for child in multiprocessing.active_children()} | threads


@pytest.fixture
def leftovers() -> Leftovers:
    before = processes_and_threads()
    return lambda: processes_and_threads() - before


def wait_for_requests(backend: Backend, count: int) -> None:
    assert wait_until(lambda: unfinished_requests(backend) >= count, TIMEOUT)


# Asynchronous mode ----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_if_the_engines_process_is_killed_all_calls_fail(open_vllm: Open, leftovers: Leftovers) -> None:
    backend = open_vllm()
    (pid,) = (item for item in leftovers() if isinstance(item, int))
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(backend.generate, PROMPTS, LONG, logprobs="none") for _ in range(4)]
        wait_for_requests(backend, 12)
        os.kill(pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(EngineError, match="open the backend again") as caught:
                call.result(TIMEOUT)
            assert caught.value.usable is False
    assert not backend.health()
    with pytest.raises(EngineError) as caught:
        backend.score_logprobs(PROMPTS)
    assert caught.value.usable is False
    with pytest.raises(EngineError):
        backend.update_weights(tiny_model(hidden_size=128).state_dict())
    backend.close()
    assert not leftovers()


@pytest.mark.nightly
def test_the_last_error_of_an_engine_that_dies_in_a_call_is_said(open_vllm: Open) -> None:
    with open_vllm(logits_processors=[failing_processor.NAME]) as backend:
        assert backend.generate(PROMPTS, {"max_new_tokens": 2}).errors is None
        fatal = {"max_new_tokens": 2, "engine_kwargs": {"extra_args": {"fail": True}}}
        for sampling in (fatal, {"max_new_tokens": 2}):
            with pytest.raises(EngineError, match=r"open the backend again; .*inside a step") as caught:
                backend.generate(PROMPTS, sampling, logprobs="none")
            assert caught.value.usable is False


@pytest.mark.nightly
def test_an_engine_without_room_for_its_cache_says_so(open_vllm: Open, leftovers: Leftovers) -> None:
    with pytest.raises(EngineError, match=r"last errors: ValueError: .*cache"):
        open_vllm(kv_cache_memory_bytes=1 << 12)
    assert not leftovers()


PROGRAM = """
import os, signal, sys
import corelm
corelm.get_backend("vllm", {model!r}, **{options!r})
print("open", flush=True)
signal.pause()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_engines_processes_end_with_the_program_that_opened_it(tiny_folder: Path, end: signal.Signals) -> None:
    code = PROGRAM.format(model=str(tiny_folder), options=SMALL)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as program:
        assert read_line(program) == "open\n"
        family = children(program.pid)
        family |= {grandchild for child in family for grandchild in children(child)}
        assert len(family) >= 2
        program.send_signal(end)
        program.wait()
        assert wait_until(lambda: not any(map(runs, family)), 20.0)


@pytest.mark.nightly
def test_closing_ends_running_calls_and_leaves_nothing_behind(open_vllm: Open, leftovers: Leftovers) -> None:
    backend = open_vllm()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(backend.generate, PROMPTS, LONG, logprobs="none")
        wait_for_requests(backend, 3)
        backend.close()
        with pytest.raises(BackendClosedError):
            call.result(TIMEOUT)
    assert not leftovers()
    # Open another one in this process, in case the first has changed something in it.
    with open_vllm() as again:
        assert again.generate(PROMPTS, {"max_new_tokens": 3, "ignore_eos": True}).ids.lengths.tolist() == [3, 3, 3]
    assert not leftovers()


# Synchronous mode -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sync(open_vllm: Open) -> Iterator[Backend]:
    with open_vllm(engine="sync") as backend:
        yield backend


def test_after_a_failed_step_no_call_gets_the_answers_of_another(sync: Backend) -> None:
    engine = sync_engine(sync)
    step = engine.llm.step

    def fail() -> Any:
        engine.llm.step = step
        raise ArithmeticError("inside a step")

    sync.generate(PROMPTS, LONG, logprobs="none")
    engine.llm.step = fail
    with pytest.raises(EngineError, match="inside a step") as caught:
        sync.generate(PROMPTS, LONG, logprobs="none")
    assert caught.value.usable is False and not sync.health()
    for _ in range(2):
        with pytest.raises(EngineError, match="open the backend again"):
            sync.generate([[5, 6, 7]], {"max_new_tokens": 2}, logprobs="none")
    # vLLM still holds the requests of the failed call, and returns their outputs in the next steps.
    late = []
    while engine.llm.has_unfinished_requests():
        late += engine.thread.submit(step).result(TIMEOUT)
    assert len(late) == len(PROMPTS)


def test_a_call_that_times_out_is_aborted_in_vllm(sync: Backend) -> None:
    with pytest.raises(BackendTimeoutError, match=r"within 0\.\d+ seconds"):
        sync.generate(PROMPTS, LONG, logprobs="none", timeout=0.02)
    result = sync.generate(PROMPTS[:1], {"max_new_tokens": 3, "ignore_eos": True}, logprobs="none")
    assert result.ids.lengths.tolist() == [3] and unfinished_requests(sync) == 0


def test_a_refused_row_does_not_affect_the_others(sync: Backend) -> None:
    # vLLM looks for stop strings in a prompt that ends in the middle of a character, as random ids may.
    letter = sync.tokenize(["a"]).ids.tolist()[0]
    prompts = [row + letter for row in random_rows(4, CONTEXT - 11, 6)]
    sampling = {"max_new_tokens": None, "min_new_tokens": 40, "stop": ["e"]}
    result = sync.generate(prompts, sampling, on_error="skip")
    assert result.errors is not None and [bool(text) for text in result.errors] == [False, True, False]
    assert result.finish_reasons[1] == "error" and result.ids.lengths[1] == 0
    assert bool((result.ids.lengths[[0, 2]] >= 40).all())


def test_many_threads_take_turns(sync: Backend) -> None:
    prompts = random_rows(*range(1, 17))
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    alone = [sync.generate([prompt], sampling).ids.tolist()[0] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = pool.map(lambda prompt: sync.generate([prompt], sampling).ids.tolist()[0], prompts)
        assert list(together) == alone


def test_a_second_engine_and_abort_are_refused(sync: Backend, open_vllm: Open) -> None:
    with pytest.raises(CapabilityError, match="one engine in a process"):
        open_vllm(engine="sync")
    assert sync.health()
    with pytest.raises(CapabilityError):
        sync.abort(["a"])


@pytest.mark.nightly
def test_a_closed_engine_makes_room_for_the_next(open_vllm: Open, leftovers: Leftovers) -> None:
    for _ in range(3):
        with open_vllm(engine="sync") as backend:
            assert backend.generate(PROMPTS, {"max_new_tokens": 2}, logprobs="none").errors is None
        with pytest.raises(BackendClosedError):
            backend.generate(PROMPTS, {"max_new_tokens": 2}, logprobs="none")
    assert not leftovers()
