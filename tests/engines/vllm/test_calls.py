"""Calls that end early: they time out, are interrupted or aborted, or the engine is closed. vLLM forgets them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from corelm import Backend, Capabilities
from corelm.errors import BackendTimeoutError, EngineError
from corelm.spec import CloseRequest, HealthRequest, WeightUpdate
from corelm_engine_kit import EventLoopThread
from engines.vllm.engine_access import unfinished_requests
from helpers.processes import wait_until
from helpers.tiny_models import CONTEXT, random_rows
from vllm_backend.capabilities import ModelInfo
from vllm_backend.engine_async import AsyncEngine

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


# Weights that are half loaded -----------------------------------------------------------------------------------------


class SilentLLM:
    """A stand-in for vLLM's `AsyncLLM` that is asked for nothing but what loading weights needs."""

    errored = False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    def shutdown(self, timeout: float) -> None: ...


def model_info(checkpoint: Path | None) -> ModelInfo:
    return ModelInfo(capabilities=Capabilities(vocab_size=9, max_context=9), tokenizer=None, checkpoint=checkpoint)


class FailingReloadEngine(AsyncEngine):
    """Raises `error` while it loads weights."""

    error: BaseException

    def _load_folder(self, folder: Path) -> None:
        assert torch.equal(load_file(folder / "model.safetensors")["w"], torch.ones(2))
        raise self.error


@pytest.mark.parametrize("error", [ArithmeticError("half of them"), KeyboardInterrupt("half of them")])
def test_an_engine_with_partly_loaded_weights_cannot_be_used_again(tmp_path: Path, error: BaseException) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    engine = FailingReloadEngine(EventLoopThread("failing"), SilentLLM(), model_info(tmp_path))
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
