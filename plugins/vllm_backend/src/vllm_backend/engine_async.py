"""vLLM in this process, asynchronous mode: an event loop drives vLLM's `AsyncLLM`, for many threads at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from typing import Any

from torch import Tensor

from corelm.errors import BackendClosedError, EngineError
from corelm.spec import AbortRequest, HealthRequest, RowFailure, WeightUpdate, hookimpl
from corelm.waiting import done_within
from corelm_engine_kit import EventLoopThread, InFlight
from vllm_backend import versions
from vllm_backend.capabilities import ModelInfo, read_model
from vllm_backend.children import attached
from vllm_backend.engine import KEPT_CACHE, InProcessEngine, OnOutput, timeout_error
from vllm_backend.handover import GpuHandover
from vllm_backend.protocol_inprocess import RowOutput, VLLMRequest, refusals

#: Seconds that the engine's process gets to shut down before it is killed.
_SHUTDOWN_GRACE = 30.0


class AsyncEngine(InProcessEngine):
    """vLLM's `AsyncLLM`, which runs its engine in another process, driven by an event loop on its own thread.

    Attributes:
        loop: the event loop; everything that touches `llm` runs there.
    """

    streams_tensors = True

    def __init__(self, loop: EventLoopThread, llm: Any, info: ModelInfo) -> None:
        super().__init__(llm, info)
        self.loop = loop
        self._in_flight = InFlight()
        self._aborted: set[str] = set()
        self._handover = GpuHandover(self._call_workers)

    @classmethod
    def start(cls, arguments: Mapping[str, Any], tokenizer: Any) -> AsyncEngine:
        """Start vLLM with these engine arguments. `tokenizer` None is the one that vLLM uses."""
        loop = EventLoopThread("vllm")
        starting: Future[Any] | None = None
        try:
            starting = loop.submit(_start(arguments))
            done_within(starting)
            llm = starting.result()
            engine = cls(loop, llm, read_model(llm.vllm_config, tokenizer, abort=True, concurrent_calls=True))
            engine.try_kept_sets(llm.vllm_config)
        except BaseException:
            # Nothing ends vLLM while it starts, so after Ctrl-C, for example, that is done afterwards.
            discarding = Thread(target=_discard, args=(loop, starting), name="vllm-discarded")
            discarding.start()
            if starting is not None and starting.done():
                discarding.join()
            raise
        return engine

    def run(
        self,
        requests: Sequence[VLLMRequest | RowFailure],
        names: Sequence[str],
        timeout: float | None,
        on_output: OnOutput | None = None,
    ) -> list[RowOutput]:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._require_usable()
        try:
            return self.loop.run(self._serve(requests, names, on_output), timeout)
        except TimeoutError:
            raise timeout_error(timeout) from None
        except Exception as error:
            if self._closed:
                raise BackendClosedError("this vLLM engine was closed during the call") from error
            if isinstance(error, EngineDeadError):
                raise EngineError(self.dead(), usable=False) from error
            raise

    async def _serve(
        self, requests: Sequence[VLLMRequest | RowFailure], names: Sequence[str], on_output: OnOutput | None
    ) -> list[RowOutput]:
        with self._in_flight.named(names) as ids:
            tasks = [
                asyncio.create_task(self._answer(request, each, on_output and partial(on_output, number)))
                for number, (request, each) in enumerate(zip(requests, ids, strict=True))
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                # If one request has failed or the caller has left, the others must not go on in the engine.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._aborted.difference_update(ids)

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        self._require_usable()
        self.loop.run(self._abort(request.request_ids))
        return True

    async def _abort(self, names: Sequence[str]) -> None:
        ids = self._in_flight.ids(names)
        self._aborted.update(ids)
        await self.llm.abort(ids)

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        return super().health(request) and not self.llm.errored

    def _end(self) -> None:
        # This cancels the requests in flight; their callers get a BackendClosedError.
        self.loop.stop()
        _shut_down(self.llm)

    async def _answer(
        self, request: VLLMRequest | RowFailure, request_id: str, on_output: Callable[[Any], None] | None
    ) -> RowOutput:
        """Return the engine's final output for one request. If this is cancelled, vLLM aborts the request."""
        if isinstance(request, RowFailure):
            return request
        if request_id in self._aborted:
            return RowFailure("the request was aborted before it began", aborted=True)
        try:
            generate = self.llm.generate
            async for output in generate(request.prompt, request.params, request_id, lora_request=request.lora):
                if on_output is not None:
                    on_output(output)
        except refusals() as error:
            return RowFailure(str(error))
        return output

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self.loop.run(getattr(self.llm, method)(*arguments, **options))

    def _remove_lora(self, lora_id: int) -> None:
        # A request whose caller has left may still be in the engine and need it.
        self._ask("pause_generation", mode="abort", clear_cache=False)
        super()._remove_lora(lora_id)
        if not self._asleep:
            self._ask("resume_generation")

    def needs_file(self, tensors: Iterable[Tensor]) -> str:
        if not self._info.takes_gpu_memory:
            return "the engine was opened without weight_transfer_config={'backend': 'ipc'}"
        from vllm import envs

        if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            return "vLLM passes handles of GPU memory only with VLLM_ALLOW_INSECURE_SERIALIZATION=1"
        if not all(tensor.is_cuda for tensor in tensors):
            return "they are not on a GPU"
        return self._handover.obstacle()

    def _hand_over(self, tensors: Iterable[tuple[str, Tensor]], largest: int) -> None:
        self._handover.load(tensors, largest)

    @contextmanager
    def _while_idle(self, request: WeightUpdate) -> Iterator[None]:
        # When a pause has begun, vLLM has ended the step in hand. A request whose caller has left may still be in the
        # engine and would keep its cached blocks, so it is aborted where no other is in flight.
        goes_on = request.when == "now"
        self._ask("pause_generation", mode="keep" if goes_on else "abort", clear_cache=False)
        try:
            yield
            # Answers in flight are read again, with the new weights.
            if not self._ask("reset_prefix_cache", **({"reset_running_requests": True} if goes_on else {})):
                raise RuntimeError(KEPT_CACHE)
            if self.capabilities.updates_in_flight:
                # vLLM says of each token which of these labels was in force in the step that sampled it.
                self._ask("update_weight_version", versions.label_of(request))
        except BaseException:
            # Nobody resumes this engine, so answers in flight must not wait for it.
            with suppress(Exception):
                self._ask("pause_generation", mode="abort", clear_cache=False)
            raise
        if not self._asleep:
            # Otherwise there is no cache to run with; waking it resumes vLLM.
            self._ask("resume_generation")


def _shut_down(llm: Any) -> None:
    # vLLM's default of 5 seconds is too short on a busy machine.
    llm.shutdown(timeout=_SHUTDOWN_GRACE)


def _discard(loop: EventLoopThread, starting: Future[Any] | None) -> None:
    """Stop the loop, and shut down an engine that nobody waits for any more, once it has started on it."""
    started = starting is not None and starting.exception() is None
    loop.stop()
    if starting is not None and started:
        _shut_down(starting.result())


async def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # With its own default, vLLM works on an eighth of the rows and tokens that `vllm.LLM` does on a large GPU.
    with attached():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
    try:
        # vLLM asks its process for this once. Afterwards a request is registered in the same step that makes it, so
        # that an abort finds it.
        await llm.get_supported_tasks()
    except BaseException:
        _shut_down(llm)
        raise
    return llm
