"""vLLM in this process: what the two modes share, and the asynchronous mode, which serves many threads at once."""

from __future__ import annotations

import asyncio
import gc
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch
from torch import Tensor

from corelm.errors import BackendClosedError, EngineError
from corelm.spec import (
    AbortRequest,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightUpdate,
)
from corelm.support import EventLoopThread, RowFailure, done_within
from vllm_backend import protocol_inprocess as protocol
from vllm_backend import scoring_by_id
from vllm_backend.capabilities import ModelInfo, read_model
from vllm_backend.compat import refusals
from vllm_backend.handover import GpuHandover
from vllm_backend.protocol_inprocess import RowOutput, VLLMRequest

DEAD = "vLLM's engine has failed and cannot go on; open the backend again"
KEPT_CACHE = "vLLM kept its prefix cache, which belongs to the old weights"
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
        checkpoint: what new weights are compared with: the folder of the model's safetensors, or names and shapes.
    """

    takes_state_dict: Literal[True] = True
    #: Whether `reload_tensors` reads each tensor when it is its turn, so that the next may use its memory.
    streams_tensors = False

    def __init__(self, info: ModelInfo) -> None:
        self.capabilities = info.capabilities
        self.tokenizer = info.tokenizer
        self.checkpoint = info.checkpoint
        self._info = info
        self._closed = False
        self._broken = False
        self._asleep = False

    def generate(self, request: GenerateRequest) -> GenerateResult:
        requests = protocol.generation_requests(request, self._info)
        on_output = protocol.on_output(request, self.tokenizer)
        outputs = self.run(requests, request.request_ids, request.timeout, on_output)
        return protocol.generation_result(request, outputs, self.tokenizer)

    def score(self, request: ScoreRequest) -> ScoreResult:
        return self._score(request, self._info)

    def choose_scoring(self, config: Any) -> None:
        """Score by id from now on, if an engine with this `VllmConfig` can, and agrees with the plain way."""
        if scoring_by_id.offered(config):
            self._info = scoring_by_id.tried(self._info, self._score)

    def _score(self, request: ScoreRequest, info: ModelInfo) -> ScoreResult:
        requests = protocol.scoring_requests(request, info)
        names = [request.request_ids[number] for number in requests]
        outputs = self.run(list(requests.values()), names, request.timeout)
        return protocol.scoring_result(request, dict(zip(requests, outputs, strict=True)), info)

    def reload(self, folder: Path, request: WeightUpdate) -> None:
        """Load the safetensors in `folder`, and forget everything computed with the old weights.

        Raises:
            EngineError: they were not loaded completely. The engine cannot be used again.
        """
        self._load(lambda: self._load_folder(folder))

    def reload_tensors(self, tensors: Iterable[tuple[str, Tensor]], largest: int) -> None:
        """Load tensors that `needs_file` accepts, with their names in the checkpoint. Errors are those of `reload`.

        Args:
            largest: bytes of the largest one.
        """
        self._load(lambda: self._hand_over(tensors, largest))

    @abstractmethod
    def needs_file(self, tensors: Iterable[Tensor]) -> str:
        """Return why these tensors have to go through a file; empty if they can be handed to vLLM as they are."""

    @abstractmethod
    def _hand_over(self, tensors: Iterable[tuple[str, Tensor]], largest: int) -> None: ...

    def forget(self, request: WeightUpdate) -> None:
        """Forget everything computed with the old weights: the owner of the model has changed them.

        Raises:
            EngineError: vLLM kept some of it. The engine cannot be used again.
        """
        self._load(lambda: None)

    def sleep(self, request: SleepRequest) -> None:
        """Free the GPU's memory; the prefix cache is emptied."""
        self._require_usable()
        self._asleep = True
        self._sleep(request.level)

    def wake(self, request: WakeRequest) -> None:
        """Take the memory again. When all of it is back, vLLM goes on to schedule requests."""
        self._require_usable()
        self._wake(sorted(request.tags))
        self._asleep = not request.last

    def _load(self, load: Callable[[], None]) -> None:
        self._require_usable()
        try:
            with self._while_idle():
                load()
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
    def _call_workers(self, method: Any, arguments: dict[str, Any]) -> list[Any]:
        """Call a method of vLLM's workers, and return what each of them returned."""

    @abstractmethod
    def _while_idle(self) -> AbstractContextManager[None]:
        """Keep requests out of vLLM in the ``with`` block, and then empty its prefix cache."""

    def _load_folder(self, folder: Path) -> None:
        if self._info.dummy:
            # Otherwise vLLM would look for a loader of random numbers that reads files.
            self._call_workers("update_config", {"overrides": {"load_config": {"load_format": "auto"}}})
        self._call_workers("reload_weights", {"weights_path": str(folder)})

    @abstractmethod
    def _sleep(self, level: int) -> None: ...

    @abstractmethod
    def _wake(self, tags: list[str]) -> None: ...

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

    streams_tensors = True

    def __init__(self, loop: EventLoopThread, llm: Any, info: ModelInfo) -> None:
        super().__init__(info)
        self.loop = loop
        self.llm = llm
        self.in_flight: dict[str, str] = {}
        self._aborted: set[str] = set()
        self._handover: GpuHandover | None = None
        self._numbers = itertools.count()

    @classmethod
    def start(cls, arguments: Mapping[str, Any], tokenizer: Any) -> AsyncEngine:
        """Start vLLM with these engine arguments. `tokenizer` None is the one that vLLM uses."""
        loop = EventLoopThread("vllm")
        starting = loop.submit(_start(arguments))
        try:
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
            engine = cls(loop, llm, info)
            engine.choose_scoring(llm.vllm_config)
        except BaseException:
            loop.stop()
            _shut_down(llm)
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

    def needs_file(self, tensors: Iterable[Tensor]) -> str:
        if not self._info.takes_gpu_memory:
            return "the engine was opened without weight_transfer_config={'backend': 'ipc'}"
        from vllm import envs

        if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            return "vLLM passes handles of GPU memory only with VLLM_ALLOW_INSECURE_SERIALIZATION=1"
        if not all(tensor.is_cuda for tensor in tensors):
            return "they are not on a GPU"
        self._handover = self._handover or GpuHandover(self._call_workers)
        return self._handover.obstacle()

    def _hand_over(self, tensors: Iterable[tuple[str, Tensor]], largest: int) -> None:
        assert self._handover is not None, "needs_file was not asked"
        self._handover.load(tensors, largest)

    def _call_workers(self, method: Any, arguments: dict[str, Any]) -> list[Any]:
        found: list[Any] = self.loop.run(self.llm.collective_rpc(method, kwargs=arguments))
        return found

    @contextmanager
    def _while_idle(self) -> Iterator[None]:
        # A request whose caller has left may still be in the engine and would keep its cached blocks.
        self.loop.run(self.llm.pause_generation(mode="abort", clear_cache=False))
        yield
        if not self.loop.run(self.llm.reset_prefix_cache()):
            raise RuntimeError(KEPT_CACHE)
        if not self._asleep:
            # Otherwise there is no cache to run with; waking it resumes vLLM.
            self.loop.run(self.llm.resume_generation())

    def _sleep(self, level: int) -> None:
        self.loop.run(self.llm.sleep(level))

    def _wake(self, tags: list[str]) -> None:
        self.loop.run(self.llm.wake_up(tags))


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


def _discard(loop: EventLoopThread, starting: Future[Any]) -> None:
    """Shut down an engine that nobody waits for any more, once it has started."""
    failed = starting.exception() is not None
    loop.stop()
    if not failed:
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
