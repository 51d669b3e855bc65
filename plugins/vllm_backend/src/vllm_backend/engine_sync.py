"""vLLM in this process, synchronous mode: one thread owns vLLM's `LLMEngine` and runs one call at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy
import torch

from corelm.errors import CapabilityError, EngineError
from corelm.spec import AbortRequest
from corelm.support import RowFailure, done_within
from vllm_backend.capabilities import ModelInfo, read_model
from vllm_backend.compat import refusals
from vllm_backend.engine import DEAD, InProcessEngine, OnOutput, collecting_garbage, timeout_error
from vllm_backend.protocol_inprocess import RowOutput, VLLMRequest

#: Held while an engine is open. Without multiprocessing vLLM keeps its engine in globals: a process can hold one.
_ONLY_ENGINE = Lock()


class SyncEngine(InProcessEngine):
    """vLLM's `LLMEngine`, for quick tests.

    Only one thread may ever call vLLM, even if the calls do not overlap. So one thread makes the engine and runs it.

    Attributes:
        thread: the executor whose single thread owns vLLM; everything that touches `llm` runs there.
        llm: vLLM's `LLMEngine`; None once the engine is closed.
    """

    def __init__(self, thread: ThreadPoolExecutor, llm: Any, info: ModelInfo, cleanup: ExitStack) -> None:
        super().__init__(info)
        self.thread = thread
        self.llm = llm
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
            thread = stack.enter_context(ThreadPoolExecutor(1, "vllm"))
            llm = thread.submit(_start, arguments).result()
            stack.callback(lambda: thread.submit(llm.engine_core.shutdown).result())
            info = read_model(llm.vllm_config, tokenizer, abort=False, concurrent_calls=False)
            return cls(thread, llm, info, stack.pop_all())

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

    def abort(self, request: AbortRequest) -> bool:
        raise CapabilityError("the synchronous mode of vLLM cannot abort requests", capability="abort")

    def health(self) -> bool:
        return not (self._closed or self._broken)

    def close(self) -> None:
        self._closed = True
        self._cleanup.close()
        self.adapters.close()
        with collecting_garbage():
            self.llm = None

    def _serve(
        self, requests: Sequence[VLLMRequest | RowFailure], caller_left: Event, on_output: OnOutput | None
    ) -> list[RowOutput]:
        """Run the requests, on the thread that owns vLLM. Abort those that are unfinished when the caller has left."""
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
            raise EngineError(f"{type(error).__name__}: {error}. {DEAD}", usable=False) from error
        return outputs

    def _replace_adapter(self, new: Any, old: Any) -> None:
        self.thread.submit(self._replace_on_thread, new, old).result()

    def _replace_on_thread(self, new: Any, old: Any) -> None:
        if new is not None:
            self.llm.add_lora(new)
        if old is not None:
            self.llm.remove_lora(old.lora_int_id)

    def _load_folder(self, folder: Path | None) -> None:
        self.thread.submit(self._load_on_thread, folder).result()

    def _load_on_thread(self, folder: Path | None) -> None:
        if folder is not None:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which belongs to the old weights")


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

    with _keeping_random_states():
        # See `engine._start`.
        return LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
