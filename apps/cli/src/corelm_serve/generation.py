"""`Call` and `Generation`: the calls of one client to the engine, and how they end when the client hangs up."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from corelm import AnswerChunk, AsyncAnswerStream, Backend
from corelm.errors import CoreLMError
from corelm.spec import GenerateResult, SamplingParams
from corelm_serve.connection import ClientLeft

R = TypeVar("R")
#: Seconds between two attempts to abort a request: the first may come before the engine knows it.
_PAUSE = 0.25


class Call(Generic[R]):
    """One call to the engine. When its client hangs up, it leaves the queue, or its result is dropped."""

    def __init__(self, submit: Callable[[], Future[R]]) -> None:
        self._submit = submit
        self._future: Future[R] | None = None
        self._dropped = False
        self._over = asyncio.Event()

    async def result(self) -> R:
        """Return the result, when it is complete.

        Raises:
            CoreLMError: as the call.
            ClientLeft: the request was dropped.
        """
        try:
            self._future = await asyncio.to_thread(self._submit)
            if self._dropped:
                self._future.cancel()
            return await asyncio.wrap_future(self._future)
        except asyncio.CancelledError:
            if self._dropped and self._future is not None and self._future.cancelled():
                raise ClientLeft from None
            raise
        finally:
            self._over.set()

    async def leave(self, *, at_once: bool = False) -> None:
        """End the request, because its client has hung up or the server ends.

        Args:
            at_once: whether to drop what an engine that cannot abort has begun to stream.
        """
        self._dropped = True
        if self._future is not None:
            self._future.cancel()


class Generation(Call[GenerateResult]):
    """One call of ``backend.generate``.

    When its client hangs up, an engine that can abort ends the answers, and they come back with the finish reason
    `abort` and the tokens so far. Another engine finishes a stream that has begun, and its answers come back whole; any
    other request leaves the queue, or its answers are dropped.
    """

    def __init__(self, backend: Backend, prompts: Any, sampling: SamplingParams, **options: Any) -> None:
        self._backend = backend
        rows, call = len(prompts) * (sampling.num_samples or 1), uuid.uuid4().hex
        self._names = tuple(f"serve-{call}-{row}" for row in range(rows))
        options["request_ids"] = self._names
        super().__init__(partial(backend.submit_generate, prompts, sampling, **options))
        self._open_stream = partial(backend.astream, prompts, sampling, **options)
        self._stream: AsyncAnswerStream[GenerateResult] | None = None
        self._begun = False

    async def chunks(self) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the tokens as they come. Afterwards `streamed` is the result.

        Raises:
            CoreLMError: as ``backend.generate``.
            ClientLeft: the request was dropped.
        """
        self._stream = self._open_stream()
        try:
            async with self._stream as stream:
                async for chunk in stream:
                    self._begun = True
                    yield chunk
                if self._dropped:
                    raise ClientLeft
        except CoreLMError as error:
            if self._dropped:
                raise ClientLeft from error
            raise
        finally:
            self._over.set()

    @property
    def streamed(self) -> GenerateResult:
        """The answers, once `chunks` was read to its end."""
        assert self._stream is not None
        return self._stream.result

    async def leave(self, *, at_once: bool = False) -> None:
        if self._backend.capabilities.abort:
            while not self._over.is_set():
                with suppress(CoreLMError):
                    await asyncio.to_thread(self._backend.abort, self._names)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._over.wait(), _PAUSE)
        elif at_once or not self._begun:
            self._dropped = True
            if self._stream is not None:
                await self._stream.aclose()
            await super().leave()
