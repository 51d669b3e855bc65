"""vLLM in this process, synchronous mode: one thread owns vLLM's `LLMEngine` and runs one call at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Event, Lock
from typing import Any

import numpy
import torch
from torch import Tensor

from corelm.errors import CapabilityError, EngineError
from corelm.spec import RowFailure, WeightUpdate
from corelm.waiting import done_within
from vllm_backend.capabilities import ModelInfo, read_model
from vllm_backend.children import attached
from vllm_backend.engine import KEPT_CACHE, InProcessEngine, OnOutput, timeout_error
from vllm_backend.protocol_inprocess import RowOutput, VLLMRequest, refusals

#: Held while an engine is open. Without multiprocessing vLLM keeps its engine in globals: a process can hold one.
_ONLY_ENGINE = Lock()


class SyncEngine(InProcessEngine):
    """vLLM's `LLMEngine`, for quick tests.

    Only one thread may ever call vLLM, even if the calls do not overlap. So one thread makes the engine and runs it.

    Attributes:
        thread: the executor whose single thread owns vLLM; everything that touches `llm` runs there.
    """

    def __init__(self, thread: ThreadPoolExecutor, llm: Any, info: ModelInfo, cleanup: ExitStack) -> None:
        super().__init__(llm, info)
        self.thread = thread
        self._cleanup = cleanup
        self._numbers = itertools.count()

    @classmethod
    def start(cls, arguments: Mapping[str, Any], tokenizer: Any) -> SyncEngine:
        """Start vLLM with these engine arguments. `tokenizer` None is the one that vLLM uses.

        Raises:
            CapabilityError: another synchronous engine is open, and multiprocessing is off.
        """
        from vllm import envs

        with ExitStack() as stack:
            if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
                if not _ONLY_ENGINE.acquire(blocking=False):
                    raise CapabilityError(
                        "vLLM can hold one engine in a process, and one is already open: close it, or leave "
                        "VLLM_ENABLE_V1_MULTIPROCESSING on",
                        capability="engine",
                    )
                stack.callback(_ONLY_ENGINE.release)
            thread = ThreadPoolExecutor(1, "vllm")
            starting = thread.submit(_start, arguments)
            try:
                done_within(starting)
            except BaseException:
                # Ctrl-C, for example. Nothing ends vLLM while it starts, so its thread does so afterwards.
                thread.submit(_discard, starting, stack.pop_all())
                thread.shutdown(wait=False)
                raise
            stack.callback(thread.shutdown)
            llm = starting.result()
            stack.callback(lambda: thread.submit(llm.engine_core.shutdown).result())
            info = read_model(llm.vllm_config, tokenizer, abort=False, concurrent_calls=False)
            engine = cls(thread, llm, info, stack)
            engine.try_kept_sets(llm.vllm_config)
            engine._cleanup = stack.pop_all()
            return engine

    def run(
        self,
        requests: Sequence[VLLMRequest | RowFailure],
        names: Sequence[str],
        timeout: float | None,
        on_output: OnOutput | None = None,
    ) -> list[RowOutput]:
        self._require_usable()
        caller_left = Event()
        future = self.thread.submit(self._serve, requests, caller_left, on_output)
        try:
            if not done_within(future, timeout):
                raise timeout_error(timeout)
            return future.result()
        finally:
            caller_left.set()

    def _end(self) -> None:
        self._cleanup.close()

    def _serve(
        self, requests: Sequence[VLLMRequest | RowFailure], caller_left: Event, on_output: OnOutput | None
    ) -> list[RowOutput]:
        """Run the requests, on vLLM's thread. Abort those that are unfinished when the caller has left."""
        self._require_usable()
        outputs: list[RowOutput] = list(requests)
        unfinished: dict[str, int] = {}
        try:
            for number, request in enumerate(requests):
                if isinstance(request, VLLMRequest):
                    request_id = str(next(self._numbers))
                    try:
                        self.llm.add_request(request_id, request.prompt, request.params, lora_request=request.lora)
                    except refusals() as error:
                        outputs[number] = RowFailure(str(error))
                    else:
                        unfinished[request_id] = number
            while unfinished and not caller_left.is_set():
                for output in self.llm.step():
                    if on_output is not None:
                        on_output(unfinished[output.request_id], output)
                    if output.finished:
                        outputs[unfinished.pop(output.request_id)] = output
            self.llm.abort_request(list(unfinished))
        except Exception as error:
            # The requests are still queued in vLLM, and a later call would get their outputs.
            self._broken = True
            raise EngineError(f"{type(error).__name__}: {error}. {self.dead()}", usable=False) from error
        return outputs

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self.thread.submit(getattr(self.llm, method), *arguments, **options).result()

    def needs_file(self, tensors: Iterable[Tensor]) -> str:
        return "" if self._info.in_this_process else "vLLM's worker is in another process"

    def _hand_over(self, tensors: Iterable[tuple[str, Tensor]], largest: int) -> None:
        self._call_workers("reload_weights", {"weights_iterator": tensors})

    @contextmanager
    def _while_idle(self, request: WeightUpdate) -> Iterator[None]:
        # Calls take turns, so no request is in vLLM.
        yield
        if not self._ask("reset_prefix_cache"):
            raise RuntimeError(KEPT_CACHE)


@contextmanager
def _keeping_random_states() -> Iterator[None]:
    """Restore the random states of this process afterwards.

    Without multiprocessing vLLM seeds them with a constant. Core draws the seeds of answers from torch's generator, so
    a program would get the same answers in every run.
    """
    python, array = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)


def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    with _keeping_random_states(), attached():
        # See `engine._start`.
        return LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)


def _discard(starting: Future[Any], cleanup: ExitStack) -> None:
    """Shut down an engine that nobody waits for any more, on the thread that has started it."""
    with cleanup:
        if starting.exception() is None:
            starting.result().engine_core.shutdown()
