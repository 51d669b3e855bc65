"""vLLM in this process: what the two modes share, and the asynchronous mode, which serves many threads at once."""

from __future__ import annotations

import asyncio
import gc
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from corelm.errors import BackendClosedError, EngineError
from corelm.spec import AbortRequest, GenerateRequest, GenerateResult, ScoreRequest, ScoreResult, WeightUpdate
from corelm.support import EventLoopThread, RowFailure, done_within
from vllm_backend import protocol_inprocess as protocol
from vllm_backend.capabilities import ModelInfo, read_model
from vllm_backend.compat import refusals
from vllm_backend.protocol_inprocess import RowOutput, VLLMRequest

DEAD = "vLLM's engine has failed and cannot go on; open the backend again"
ABORTED_EARLY = RowFailure("the request was aborted before it began", aborted=True)

#: Takes the number of a request and one of its outputs.
OnOutput = Callable[[int, Any], None]

#: Seconds that the engine's process gets to shut down before it is killed.
_SHUTDOWN_GRACE = 30.0


class InProcessEngine(ABC):
    """Builds vLLM's requests, lets the subclass run them, and parses their outputs.

    Attributes:
        capabilities: what the backend declares.
        tokenizer: the tokenizer of the backend.
        checkpoint: the folder of the model's safetensors, which new weights are compared with.
    """

    takes_state_dict = True

    def __init__(self, info: ModelInfo) -> None:
        self.capabilities = info.capabilities
        self.tokenizer = info.tokenizer
        self.checkpoint = info.checkpoint
        self._info = info
        self._closed = False
        self._broken = False

    def generate(self, request: GenerateRequest) -> GenerateResult:
        requests = protocol.generation_requests(request, self._info)
        on_output = protocol.on_output(request, self.tokenizer)
        outputs = self.run(requests, request.request_ids, request.timeout, on_output)
        return protocol.generation_result(request, outputs, self.tokenizer)

    def score(self, request: ScoreRequest) -> ScoreResult:
        requests = protocol.scoring_requests(request, self._info)
        names = [request.request_ids[number] for number in requests]
        outputs = self.run(list(requests.values()), names, request.timeout)
        return protocol.scoring_result(request, dict(zip(requests, outputs, strict=True)), self._info)

    def reload(self, folder: Path, request: WeightUpdate) -> None:
        """Load the safetensors in `folder`, and forget everything computed with the old weights.

        Raises:
            EngineError: they were not loaded completely. The engine cannot be used again.
        """
        self._load(folder)

    def forget(self, request: WeightUpdate) -> None:
        """Forget everything computed with the old weights: the owner of the model has changed them.

        Raises:
            EngineError: vLLM kept some of it. The engine cannot be used again.
        """
        self._load(None)

    def _load(self, folder: Path | None) -> None:
        self._require_usable()
        try:
            self._load_folder(folder)
        except BaseException as error:
            # Some of the weights may be new ones.
            self._broken = True
            if not isinstance(error, Exception):
                raise
            raise EngineError(f"the new weights are not in force: {error}. {DEAD}", usable=False) from error

    @abstractmethod
    def run(
        self,
        requests: Sequence[VLLMRequest | RowFailure],
        names: Sequence[str],
        timeout: float | None,
        on_output: OnOutput | None = None,
    ) -> list[RowOutput]:
        """Return the output of every request, in order; failures are returned as they are.

        Args:
            requests: what to run.
            names: the name of each request, for `abort`.
            timeout: seconds for all of them together, or None.
            on_output: takes the number of a request and each of its outputs, the last included.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
            EngineError: the engine has failed and cannot be used again.
        """

    @abstractmethod
    def abort(self, request: AbortRequest) -> bool: ...

    @abstractmethod
    def health(self) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _load_folder(self, folder: Path | None) -> None:
        """Load the safetensors in `folder`, if there is one, and empty vLLM's caches."""

    def _require_usable(self) -> None:
        if self._closed:
            raise BackendClosedError("this vLLM engine is closed")
        if self._broken:
            raise EngineError(DEAD, usable=False)


class AsyncEngine(InProcessEngine):
    """vLLM's `AsyncLLM`, which runs its engine in another process, driven by an event loop on its own thread.

    Attributes:
        loop: the event loop; everything that touches `llm` runs there.
        llm: vLLM's `AsyncLLM`; None once the engine is closed.
        in_flight: vLLM's id of every request in flight, with the caller's name. Two callers may use the same name.
    """

    def __init__(self, loop: EventLoopThread, llm: Any, info: ModelInfo) -> None:
        super().__init__(info)
        self.loop = loop
        self.llm = llm
        self.in_flight: dict[str, str] = {}
        self._aborted: set[str] = set()
        self._numbers = itertools.count()

    @classmethod
    def start(cls, arguments: Mapping[str, Any], tokenizer: Any) -> AsyncEngine:
        """Start vLLM with these engine arguments. `tokenizer` None is the one that vLLM uses."""
        loop = EventLoopThread("vllm")
        starting: Future[Any] | None = None
        try:
            starting = loop.submit(_start(arguments))
            done_within(starting)
        except BaseException:
            # Ctrl-C, for example. Nothing ends vLLM while it starts, so that is done afterwards.
            Thread(target=_discard, args=(loop, starting), name="vllm-discarded").start()
            raise
        try:
            llm = starting.result()
        except BaseException:
            loop.stop()
            raise
        try:
            info = read_model(llm.vllm_config, tokenizer, abort=True, concurrent_calls=True)
        except BaseException:
            loop.stop()
            _shut_down(llm)
            raise
        return cls(loop, llm, info)

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
            return self.loop.run(self.serve(requests, names, on_output), timeout)
        except TimeoutError:
            raise timeout_error(timeout) from None
        except Exception as error:
            if self._closed:
                raise BackendClosedError("this vLLM engine was closed during the call") from error
            if isinstance(error, EngineDeadError):
                raise EngineError(DEAD, usable=False) from error
            raise

    async def serve(
        self, requests: Sequence[VLLMRequest | RowFailure], names: Sequence[str], on_output: OnOutput | None = None
    ) -> list[RowOutput]:
        """Do what `run` does, on the event loop and without a timeout."""
        ids = [str(next(self._numbers)) for _ in requests]
        self.in_flight.update(zip(ids, names, strict=True))
        tasks = [
            asyncio.create_task(self._answer(request, name, None if on_output is None else partial(on_output, number)))
            for number, (request, name) in enumerate(zip(requests, ids, strict=True))
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # If one request has failed or the caller has left, the others must not go on in the engine.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for request_id in ids:
                del self.in_flight[request_id]
            self._aborted.difference_update(ids)

    def abort(self, request: AbortRequest) -> bool:
        self._require_usable()
        self.loop.run(self.abort_named(frozenset(request.request_ids)))
        return True

    async def abort_named(self, names: frozenset[str]) -> None:
        """Do what `abort` does, on the event loop."""
        ids = [request_id for request_id, name in self.in_flight.items() if name in names]
        self._aborted.update(ids)
        await self.llm.abort(ids)

    def health(self) -> bool:
        return not (self._closed or self._broken or self.llm.errored)

    def close(self) -> None:
        self._closed = True
        # This cancels the requests in flight; their callers get a BackendClosedError.
        self.loop.stop()
        _shut_down(self.llm)
        with collecting_garbage():
            self.llm = None

    async def _answer(
        self, request: VLLMRequest | RowFailure, request_id: str, on_output: Callable[[Any], None] | None
    ) -> RowOutput:
        """Return the engine's final output for one request. If this is cancelled, vLLM aborts the request."""
        if isinstance(request, RowFailure):
            return request
        if request_id in self._aborted:
            return ABORTED_EARLY
        try:
            async for output in self.llm.generate(request.prompt, request.params, request_id):
                if on_output is not None:
                    on_output(output)
        except refusals() as error:
            return RowFailure(str(error))
        return output

    def _load_folder(self, folder: Path | None) -> None:
        self.loop.run(self._load_on_loop(folder))

    async def _load_on_loop(self, folder: Path | None) -> None:
        # A request whose caller has left may still be in the engine and would keep its cached blocks.
        await self.llm.pause_generation(mode="abort", clear_cache=False)
        if folder is not None:
            await self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        if not await self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which belongs to the old weights")
        await self.llm.resume_generation()


def timeout_error(timeout: float | None) -> TimeoutError:
    return TimeoutError("vLLM did not answer in time" + ("" if timeout is None else f", within {timeout:g} seconds"))


@contextmanager
def collecting_garbage() -> Iterator[None]:
    """Free at once what the ``with`` block releases.

    vLLM's objects reference one another in cycles, and the threads of its sockets live until the cycles are collected.
    """
    with warnings.catch_warnings():
        # vLLM offers no call that closes the context of its sockets.
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()
        # Without multiprocessing, and with weights that were handed over, this process itself holds memory of the GPU.
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _shut_down(llm: Any) -> None:
    # vLLM's default of 5 seconds is too short on a busy machine.
    llm.shutdown(timeout=_SHUTDOWN_GRACE)


def _discard(loop: EventLoopThread, starting: Future[Any] | None) -> None:
    """Shut down an engine that nobody waits for any more, once it has started."""
    failed = starting is None or starting.exception() is not None
    loop.stop()
    if starting is not None and not failed:
        _shut_down(starting.result())


async def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # With its own default, vLLM works on an eighth of the rows and tokens that `vllm.LLM` does on a large GPU.
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
    # vLLM asks its process for this once. Afterwards a request is registered in the same step that makes it, so that an
    # abort finds it.
    await llm.get_supported_tasks()
    return llm
