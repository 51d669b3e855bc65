"""Calls that end early: too late, interrupted, aborted or overtaken by `close`. The engine forgets them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from corelm import Backend, Capabilities
from corelm.errors import BackendClosedError, BackendTimeoutError, EngineError
from corelm.spec.records import AbortRequest, WeightUpdate
from corelm.support.event_loop import EventLoopThread
from helpers.tiny_models import CONTEXT, random_rows
from vllm_backend.engine import AsyncEngine
from vllm_backend.model import Model
from vllm_backend.outcomes import Unserved
from vllm_backend.requests import ABORTED, Row

PROMPTS = random_rows(4, 5, 6)
LONG = {"max_new_tokens": CONTEXT - 8, "ignore_eos": True}


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it comes true in that time."""
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > end:
            return False
        pause.wait(0.005)
    return True


def unfinished(engine: AsyncEngine) -> int:
    """How many requests vLLM holds."""
    count: int = engine.llm.get_num_unfinished_requests()
    return count


def holds_nothing(engine: AsyncEngine) -> bool:
    """Whether vLLM's process has no request either: only then can it empty its prefix cache."""
    emptied: bool = engine._loop.run(engine.llm.reset_prefix_cache())
    return unfinished(engine) == 0 and emptied


# On a real engine -----------------------------------------------------------------------------------------------------


def test_a_call_that_takes_too_long_is_aborted_in_the_engine(shared: Backend, engine: AsyncEngine) -> None:
    with pytest.raises(BackendTimeoutError, match=r"within 0\.\d+ seconds"):
        shared.generate(PROMPTS, LONG, logprobs="none", timeout=0.05)
    assert eventually(lambda: holds_nothing(engine))
    with pytest.raises(BackendTimeoutError):
        shared.score_logprobs(random_rows(*[CONTEXT] * 40), timeout=0.05)
    assert eventually(lambda: holds_nothing(engine)) and shared.health()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that was started in the background may ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_is_aborted_in_the_engine(shared: Backend, engine: AsyncEngine) -> None:
    def interrupt() -> None:
        if eventually(lambda: unfinished(engine) == len(PROMPTS)):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        shared.generate(PROMPTS, LONG, logprobs="none")
    thread.join()
    assert eventually(lambda: holds_nothing(engine)) and shared.health()


def test_abort_ends_all_requests_of_that_name_and_no_other(shared: Backend, engine: AsyncEngine) -> None:
    with ThreadPoolExecutor(3) as pool:
        # Names are one call's own, so two calls may choose the same.
        calls = [
            pool.submit(shared.generate, PROMPTS[:2], LONG, request_ids=names)
            for names in (["x", "y"], ["x", "z"], ["v", "w"])
        ]
        assert eventually(lambda: unfinished(engine) == 6)
        shared.abort(["x", "w", "nobody"])
        batches = [call.result() for call in calls]
    reasons = [reason for batch in batches for reason in batch.finish_reasons]
    assert reasons == ["abort", "length", "abort", "length", "length", "abort"]
    for batch in batches:
        for reason, answer, logprobs in zip(
            batch.finish_reasons, batch.ids.tolist(), batch.logprobs.split(), strict=True
        ):
            assert len(answer) == len(logprobs)
            assert len(answer) < LONG["max_new_tokens"] if reason == "abort" else len(answer) == LONG["max_new_tokens"]


# On one that does what it is told -------------------------------------------------------------------------------------


class Scripted:
    """Stands for vLLM's `AsyncLLM`: a request is answered, fails or waits, as its prompt says, and may be aborted."""

    errored = False

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Event] = {}
        self.ended_early: list[str] = []

    async def generate(self, prompt: str, params: Any, key: str) -> AsyncIterator[Any]:
        if prompt == "fail":
            raise ArithmeticError("in the engine")
        if prompt == "wait":
            self.running[key] = asyncio.Event()
            try:
                await self.running[key].wait()
            except asyncio.CancelledError:
                self.ended_early.append(key)
                raise
        yield prompt

    async def abort(self, keys: list[str]) -> None:
        for key in keys:
            if key in self.running:
                self.running[key].set()

    def shutdown(self, timeout: float) -> None: ...


def model_in(folder: Path | None) -> Model:
    return Model(Capabilities(vocab_size=9, max_context=9), tokenizer=None, folder=folder)


@pytest.fixture
def scripted() -> Iterator[AsyncEngine]:
    engine = AsyncEngine(EventLoopThread("scripted"), Scripted(), model_in(None))
    yield engine
    if not engine._closed:
        engine.close()


def run(engine: AsyncEngine, *prompts: str, names: list[str] | None = None) -> Future[list[Any]]:
    rows = [Row(prompt, None) for prompt in prompts]
    pool = ThreadPoolExecutor(1)
    future = pool.submit(engine._run, rows, names or [*prompts], None)
    pool.shutdown(wait=False)
    return future


def test_an_engine_that_fails_on_one_row_does_not_go_on_with_the_others(scripted: AsyncEngine) -> None:
    with pytest.raises(ArithmeticError):
        run(scripted, "wait", "fail", "wait").result()
    assert len(scripted.llm.ended_early) == 2 and not scripted._in_flight


def test_what_is_aborted_before_it_began_is_never_sent(scripted: AsyncEngine) -> None:
    async def abort_first() -> list[Any]:
        call = asyncio.create_task(scripted._serve([Row("wait", None), Row("answer", None)], ["a", "b"]))
        # One step: the call is known, and none of its rows has begun.
        await asyncio.sleep(0)
        await scripted._abort(frozenset("a"))
        return await call

    assert scripted._loop.run(abort_first(), 60) == [ABORTED, "answer"]
    assert not scripted.llm.running and not scripted._in_flight and not scripted._aborted


def test_a_refused_row_is_not_sent(scripted: AsyncEngine) -> None:
    refused = Unserved("no")
    assert scripted._run([refused, Row("answer", None)], ["a", "b"], None) == [refused, "answer"]


def test_close_ends_calls_that_are_under_way_with_a_typed_error(scripted: AsyncEngine) -> None:
    future = run(scripted, "wait")
    assert eventually(lambda: bool(scripted.llm.running))
    scripted.close()
    with pytest.raises(BackendClosedError):
        future.result(60)
    with pytest.raises(BackendClosedError):
        scripted._run([], [], None)
    with pytest.raises(BackendClosedError):
        scripted.abort(AbortRequest(request_ids=("a",)))
    assert not scripted.health()


class Halfway(AsyncEngine):
    """One that does not finish loading weights."""

    error: BaseException

    def _reload(self, folder: Path) -> None:
        assert torch.equal(load_file(folder / "model.safetensors")["w"], torch.ones(2))
        raise self.error


@pytest.mark.parametrize("error", [ArithmeticError("half of them"), KeyboardInterrupt("half of them")])
def test_an_engine_whose_weights_were_not_all_loaded_is_not_used_again(tmp_path: Path, error: BaseException) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    engine = Halfway(EventLoopThread("halfway"), Scripted(), model_in(tmp_path))
    engine.error = error
    update = WeightUpdate(version="1", drain=True, state_dict={"w": torch.ones(2)})
    with pytest.raises((EngineError, KeyboardInterrupt), match="half of them") as caught:
        engine.update_weights(update)
    assert isinstance(caught.value, KeyboardInterrupt) or caught.value.usable is False
    assert not engine.health()
    for call in (lambda: engine._run([], [], None), lambda: engine.update_weights(update)):
        with pytest.raises(EngineError, match="open the backend again"):
            call()
    engine.close()


def test_prompts_that_do_not_fit_into_one_step_together_are_answered(open_vllm: Callable[..., Backend]) -> None:
    """Together they are more tokens than the engine reads at a time, and every answer has a seed."""
    prompts = random_rows(*[40] * 8)
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    with open_vllm(max_model_len=64, max_num_batched_tokens=64) as backend:
        together = backend.generate(prompts, sampling, seeds=range(8))
        assert [len(row) for row in together.ids.tolist()] == [4] * 8
        alone = [backend.generate([row], sampling, seeds=[seed]).ids.tolist()[0] for seed, row in enumerate(prompts)]
        assert together.ids.tolist() == alone and backend.health()
