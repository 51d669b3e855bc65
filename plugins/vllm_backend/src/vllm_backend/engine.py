"""vLLM in this process: what its two modes share, and the one that serves many threads at once."""

from __future__ import annotations

import asyncio
import gc
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corelm.errors import BackendClosedError, EngineError
from corelm.spec import AbortRequest, GenerateRequest, GenerateResult, ScoreRequest, ScoreResult, WeightUpdate
from corelm.support import EventLoopThread
from vllm_backend import requests, weights
from vllm_backend.model import Model, describe
from vllm_backend.outcomes import Unserved
from vllm_backend.requests import ABORTED, Outcome, Row

DEAD = "vLLM's engine has failed and cannot go on; open the backend again"

#: Seconds that the engine's process has to leave in good order before it is killed.
_GRACE = 30.0


class Engine(ABC):
    """A request is turned into rows, the rows are run, and what comes back is turned into the result."""

    def __init__(self, model: Model) -> None:
        self.capabilities = model.capabilities
        self.tokenizer = model.tokenizer
        self._model = model
        self._closed = False
        self._broken = False

    def generate(self, request: GenerateRequest) -> GenerateResult:
        rows = requests.generation_rows(request, self._model.max_context)
        return requests.answers(request, self._run(rows, request.request_ids, request.timeout))

    def score(self, request: ScoreRequest) -> ScoreResult:
        rows = requests.scoring_rows(request)
        names = [request.request_ids[number] for number in rows]
        outcomes = self._run(list(rows.values()), names, request.timeout)
        return requests.scores(request, dict(zip(rows, outcomes, strict=True)))

    def update_weights(self, request: WeightUpdate) -> bool:
        self._usable()
        assert self._model.folder is not None
        with weights.fitting(request, self._model.folder) as folder:
            try:
                self._reload(folder)
            except BaseException as error:
                # Some of the weights may be the new ones.
                self._broken = True
                if not isinstance(error, Exception):
                    raise
                raise EngineError(f"the new weights were not loaded: {error}. {DEAD}", usable=False) from error
        return True

    @abstractmethod
    def _run(self, rows: Sequence[Row | Unserved], names: Sequence[str], timeout: float | None) -> list[Outcome]:
        """One outcome a row, in order.

        Raises:
            TimeoutError: it took longer than `timeout` seconds. EngineError: the engine has failed for good.
        """

    @abstractmethod
    def _reload(self, folder: Path) -> None:
        """Load the safetensors in `folder`, and forget what was computed with the old weights."""

    @abstractmethod
    def abort(self, request: AbortRequest) -> bool: ...

    @abstractmethod
    def health(self) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...

    def _usable(self) -> None:
        if self._closed:
            raise BackendClosedError("this vLLM engine is closed")
        if self._broken:
            raise EngineError(DEAD, usable=False)


class AsyncEngine(Engine):
    """vLLM's `AsyncLLM`, whose engine is a process of its own, behind an event loop on a thread of its own."""

    def __init__(self, loop: EventLoopThread, llm: Any, model: Model) -> None:
        super().__init__(model)
        self._loop = loop
        self.llm = llm
        self._numbers = itertools.count()
        #: What vLLM knows a request as, and what its caller calls it. Callers may choose one name twice.
        self._in_flight: dict[str, str] = {}
        self._aborted: set[str] = set()

    @classmethod
    def start(cls, arguments: Mapping[str, Any], tokenizer: Any) -> AsyncEngine:
        loop = EventLoopThread("vllm")
        try:
            llm = loop.run(_start(arguments))
        except BaseException:
            loop.stop()
            raise
        try:
            model = describe(llm.vllm_config, tokenizer, abort=True, concurrent_calls=True)
        except BaseException:
            loop.stop()
            _shut_down(llm)
            raise
        return cls(loop, llm, model)

    def abort(self, request: AbortRequest) -> bool:
        self._usable()
        self._loop.run(self._abort(frozenset(request.request_ids)))
        return True

    def health(self) -> bool:
        return not (self._closed or self._broken or self.llm.errored)

    def close(self) -> None:
        self._closed = True
        # What is in flight is cancelled, and its callers are told that the engine was closed.
        self._loop.stop()
        _shut_down(self.llm)
        with letting_go():
            self.llm = None

    def _run(self, rows: Sequence[Row | Unserved], names: Sequence[str], timeout: float | None) -> list[Outcome]:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._usable()
        try:
            return self._loop.run(self._serve(rows, names), timeout)
        except FutureTimeout:
            raise late(timeout) from None
        except Exception as error:
            if self._closed:
                raise BackendClosedError("this vLLM engine was closed during the call") from error
            if isinstance(error, EngineDeadError):
                raise EngineError(DEAD, usable=False) from error
            raise

    async def _serve(self, rows: Sequence[Row | Unserved], names: Sequence[str]) -> list[Outcome]:
        keys = [str(next(self._numbers)) for _ in rows]
        self._in_flight.update(zip(keys, names, strict=True))
        tasks = [asyncio.create_task(self._answer(row, key)) for row, key in zip(rows, keys, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # If a row has failed, or the caller has gone, the others must not run on in the engine.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for key in keys:
                del self._in_flight[key]
            self._aborted.difference_update(keys)

    async def _answer(self, row: Row | Unserved, key: str) -> Outcome:
        """The engine's last word on one row. If this is cancelled, vLLM aborts the request."""
        from vllm.exceptions import GracefulHTTPError, VLLMClientError

        if isinstance(row, Unserved):
            return row
        if key in self._aborted:
            return ABORTED
        try:
            outputs = [output async for output in self.llm.generate(row.prompt, row.params, key)]
        except (VLLMClientError, GracefulHTTPError) as error:
            return Unserved(str(error))
        # Only the final one is asked for.
        return outputs[-1]

    async def _abort(self, names: frozenset[str]) -> None:
        keys = [key for key, name in self._in_flight.items() if name in names]
        self._aborted.update(keys)
        await self.llm.abort(keys)

    def _reload(self, folder: Path) -> None:
        self._loop.run(self._reload_from(str(folder)))

    async def _reload_from(self, folder: str) -> None:
        # A request whose caller has gone may still be in the engine, and would hold on to what it has cached.
        await self.llm.pause_generation(mode="abort", clear_cache=False)
        await self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if not await self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which belongs to the old weights")
        await self.llm.resume_generation()


def late(timeout: float | None) -> TimeoutError:
    return TimeoutError("vLLM did not answer in time" + ("" if timeout is None else f", within {timeout:g} seconds"))


@contextmanager
def letting_go() -> Iterator[None]:
    """Free what is let go inside: vLLM's objects hold one another, and its sockets' threads live as long as they do."""
    with warnings.catch_warnings():
        # vLLM has no call that closes the context of its sockets.
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def _shut_down(llm: Any) -> None:
    # By itself vLLM waits for 5 seconds, which is little on a busy machine.
    llm.shutdown(timeout=_GRACE)


async def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    # Asked once, it is known: from then on a request is registered in the same step in which it is made.
    await llm.get_supported_tasks()
    return llm
