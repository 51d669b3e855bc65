"""Calls that end early: they time out, are interrupted or aborted, or the engine is closed. vLLM forgets them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from corelm import Backend, Capabilities
from corelm.errors import BackendClosedError, BackendTimeoutError, EngineError
from corelm.spec import AbortRequest, CloseRequest, HealthRequest, RowFailure, WeightUpdate
from corelm_engine_kit import EventLoopThread
from engines.vllm.engine_access import unfinished_requests
from helpers.processes import wait_until
from helpers.tiny_models import CONTEXT, random_rows
from vllm_backend.capabilities import ModelInfo
from vllm_backend.engine_async import AsyncEngine
from vllm_backend.protocol_inprocess import VLLMRequest

PROMPTS = random_rows(4, 5, 6)
LONG = {"max_new_tokens": CONTEXT - 8, "ignore_eos": True}


# A real engine --------------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm_is_idle(shared: Backend, engine: AsyncEngine) -> Callable[[], bool]:
    def idle() -> bool:
        # vLLM's process can empty its prefix cache only while it holds no request either.
        emptied: bool = engine.loop.run(engine.llm.reset_prefix_cache())
        return unfinished_requests(shared) == 0 and emptied

    return lambda: wait_until(idle)


def test_a_call_that_times_out_is_aborted_in_vllm(shared: Backend, vllm_is_idle: Callable[[], bool]) -> None:
    with pytest.raises(BackendTimeoutError, match=r"within 0\.\d+ seconds"):
        shared.generate(PROMPTS, LONG, logprobs="none", timeout=0.05)
    assert vllm_is_idle()
    with pytest.raises(BackendTimeoutError):
        shared.score_logprobs(random_rows(*[CONTEXT] * 40), timeout=0.05)
    assert vllm_is_idle() and shared.health()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt: a process that was started in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_is_aborted_in_vllm(shared: Backend, vllm_is_idle: Callable[[], bool]) -> None:
    def interrupt() -> None:
        if wait_until(lambda: unfinished_requests(shared) == len(PROMPTS)):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        shared.generate(PROMPTS, LONG, logprobs="none")
    thread.join()
    assert vllm_is_idle() and shared.health()


def test_abort_ends_every_request_with_that_name_and_no_other(shared: Backend) -> None:
    with ThreadPoolExecutor(3) as pool:
        # Names are unique within one call only, so two calls may use the same.
        calls = [
            pool.submit(shared.generate, PROMPTS[:2], LONG, request_ids=names)
            for names in (["x", "y"], ["x", "z"], ["v", "w"])
        ]
        assert wait_until(lambda: unfinished_requests(shared) == 6)
        shared.abort(["x", "w", "unknown"])
        results = [call.result() for call in calls]
    reasons = [reason for result in results for reason in result.finish_reasons]
    assert reasons == ["abort", "length", "abort", "length", "length", "abort"]
    for result in results:
        assert result.logprobs is not None
        rows = zip(result.finish_reasons, result.ids.tolist(), result.logprobs.split(), strict=True)
        for reason, answer, logprobs in rows:
            assert len(answer) == len(logprobs)
            assert len(answer) < LONG["max_new_tokens"] if reason == "abort" else len(answer) == LONG["max_new_tokens"]


@pytest.mark.nightly
def test_prompts_that_do_not_fit_into_one_step_are_answered(open_vllm: Callable[..., Backend]) -> None:
    """Together the prompts are longer than what the engine reads in one step, and every answer has a seed."""
    prompts = random_rows(*[40] * 8)
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    with open_vllm(max_model_len=64, max_num_batched_tokens=64) as backend:
        together = backend.generate(prompts, sampling, seeds=range(8))
        assert [len(row) for row in together.ids.tolist()] == [4] * 8
        alone = [backend.generate([row], sampling, seeds=[seed]).ids.tolist()[0] for seed, row in enumerate(prompts)]
        assert together.ids.tolist() == alone and backend.health()


# A scripted engine ----------------------------------------------------------------------------------------------------


class ScriptedLLM:
    """A stand-in for vLLM's `AsyncLLM`. The prompt decides: "fail" raises, "wait" waits for an abort, others return.

    Attributes:
        waiting: the event that ends each waiting request, by id.
        cancelled: the ids of the waiting requests that were cancelled.
    """

    errored = False

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []

    async def generate(self, prompt: str, params: Any, request_id: str, lora_request: Any = None) -> AsyncIterator[Any]:
        if prompt == "fail":
            raise ArithmeticError("in the engine")
        if prompt == "wait":
            self.waiting[request_id] = asyncio.Event()
            try:
                await self.waiting[request_id].wait()
            except asyncio.CancelledError:
                self.cancelled.append(request_id)
                raise
        yield prompt

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self.waiting:
                self.waiting[request_id].set()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    def shutdown(self, timeout: float) -> None: ...


def model_info(checkpoint: Path | None) -> ModelInfo:
    return ModelInfo(Capabilities(vocab_size=9, max_context=9), tokenizer=None, checkpoint=checkpoint)


@pytest.fixture
def scripted() -> Iterator[AsyncEngine]:
    engine = AsyncEngine(EventLoopThread("scripted"), ScriptedLLM(), model_info(None))
    yield engine
    if engine.health(HealthRequest()):
        engine.close(CloseRequest())


def start(engine: AsyncEngine, *prompts: str) -> Future[list[Any]]:
    """Run requests for these prompts on another thread."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(engine.run, [VLLMRequest(prompt, None) for prompt in prompts], prompts, None)
    pool.shutdown(wait=False)
    return future


def test_if_one_request_fails_the_others_are_cancelled(scripted: AsyncEngine) -> None:
    with pytest.raises(ArithmeticError):
        start(scripted, "wait", "fail", "wait").result()
    assert len(scripted.llm.cancelled) == 2 and not scripted.in_flight


def test_a_request_that_is_aborted_before_it_began_is_not_sent(scripted: AsyncEngine) -> None:
    async def abort_first() -> list[Any]:
        requests = [VLLMRequest("wait", None), VLLMRequest("answer", None)]
        call = asyncio.create_task(scripted.serve(requests, ["a", "b"]))
        # After one step the call is registered, but none of its requests has begun.
        await asyncio.sleep(0)
        await scripted.abort_named(frozenset("a"))
        return await call

    assert scripted.loop.run(abort_first(), 60) == [
        RowFailure("the request was aborted before it began", aborted=True),
        "answer",
    ]
    assert not scripted.llm.waiting and not scripted.in_flight


def test_a_refused_row_is_not_sent(scripted: AsyncEngine) -> None:
    refused = RowFailure("no")
    assert scripted.run([refused, VLLMRequest("answer", None)], ["a", "b"], None) == [refused, "answer"]


def test_closing_ends_running_calls_and_refuses_later_ones(scripted: AsyncEngine) -> None:
    future = start(scripted, "wait")
    assert wait_until(lambda: bool(scripted.llm.waiting))
    scripted.close(CloseRequest())
    with pytest.raises(BackendClosedError):
        future.result(60)
    with pytest.raises(BackendClosedError):
        scripted.run([], [], None)
    with pytest.raises(BackendClosedError):
        scripted.abort(AbortRequest(request_ids=("a",)))
    assert not scripted.health(HealthRequest())


class FailingReloadEngine(AsyncEngine):
    """Raises `error` while it loads weights."""

    error: BaseException

    def _load_folder(self, folder: Path) -> None:
        assert torch.equal(load_file(folder / "model.safetensors")["w"], torch.ones(2))
        raise self.error


@pytest.mark.parametrize("error", [ArithmeticError("half of them"), KeyboardInterrupt("half of them")])
def test_an_engine_with_partly_loaded_weights_cannot_be_used_again(tmp_path: Path, error: BaseException) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    engine = FailingReloadEngine(EventLoopThread("failing"), ScriptedLLM(), model_info(tmp_path))
    engine.error = error
    update = WeightUpdate(version="1", when="drain", state_dict={"w": torch.ones(2)})
    with pytest.raises((EngineError, KeyboardInterrupt), match="half of them") as caught:
        engine.update_weights(update)
    assert isinstance(caught.value, KeyboardInterrupt) or caught.value.usable is False
    assert not engine.health(HealthRequest())
    for call in (lambda: engine.run([], [], None), lambda: engine.update_weights(update)):
        with pytest.raises(EngineError, match="open the backend again"):
            call()
    engine.close(CloseRequest())
