"""The ways to call an `LLMPolicy` other than `forward`: without blocking, token by token, and with other callers."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from corelm import validate
from corelm.backend.backend import Backend
from corelm.backend.delivery import Listener
from corelm.backend.prepared_call import PreparedCall
from corelm.backend.streams import AnswerStream, AsyncAnswerStream
from corelm.batching import DynamicBatcher, Limits
from corelm.policy.options import PolicyOptions
from corelm.policy.progress import AnswerBar, answer_bar
from corelm.policy.rows import InputRows
from corelm.spec.records import GenerateResult, ScoreResult


class PolicyCalls:
    """Calls that are made of the two halves of `LLMPolicy.forward`."""

    backend: Backend
    options: PolicyOptions

    async def aforward(
        self,
        tensordict: TensorDictBase,
        *,
        seed: int | None = None,
        timeout: float | None = None,
        progress: bool = False,
    ) -> TensorDictBase:
        """Generate or score as `forward` does, without ever blocking the event loop.

        With `batching` no thread waits while the engine works. Cancelling the task takes its request out of the queue,
        or aborts it in an engine that can abort.

        Raises:
            InvalidRequestError: as for `forward`. Also in a hook wrapper or a callback of a batcher, where the call
                would wait for itself.
        """
        self.backend.require_outside("aforward")
        with self._bar(progress) as bar:
            rows, call = await asyncio.to_thread(self._prepare, tensordict, seed, timeout, bar=bar)
            result = await asyncio.wrap_future(self.backend.submit(call))
            if bar is not None:
                bar.complete(result)
            return await asyncio.to_thread(self._finish, tensordict, rows, result)

    def resume(
        self,
        tensordict: TensorDictBase,
        continue_from: TensorDictBase,
        *,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Complete the answers that the policy has returned before, under the weights in force, and return all of it.

        They go on from their ids, which are not tokenized again. Old tokens keep their log-probs and their version, and
        answers that have ended stay as they are.

        Args:
            tensordict: what `forward` reads: the same prompts.
            continue_from: what `forward` has returned for them, with tokens and, if this policy writes them, log-probs.
            seed: as for `forward`.
            timeout: as for `forward`.

        Raises:
            InvalidRequestError: as for `forward`; or the answers are to other prompts, or cannot go on like this.
            MissingKeyError: as for `forward`; or `continue_from` lacks tokens or finish reasons.
            ProvenanceMismatchError: the log-probs of `continue_from` are of another distribution.
        """
        if not self.options.generate:
            raise validate.invalid("generate", "only answers can go on, and this policy scores")
        rows, call = self._prepare(tensordict, seed, timeout, continue_from=continue_from)
        return self._finish(tensordict, rows, self.backend.run(call))

    def stream(
        self, tensordict: TensorDictBase, *, seed: int | None = None, timeout: float | None = None
    ) -> AnswerStream[TensorDictBase]:
        """Start to generate, and return an iterator over the tokens of the answers, with text and log-probs.

        Each `AnswerChunk` says which row of the flattened batch it belongs to. After the last chunk, ``stream.result``
        is the TensorDict that calling the policy returns. Use the stream as a context manager if you may leave early::

            with policy.stream(td, seed=7) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
            stream.result["history"].full

        Args:
            tensordict: what `forward` reads.
            seed: as for `forward`.
            timeout: as for `forward`. The time that you take to read does not count.

        Raises:
            CoreLMError: the errors of `forward`. Those of the input are raised here, those of the engine while reading.
        """
        return AnswerStream(self.backend, partial(self._plan, tensordict, seed, timeout))

    def astream(
        self, tensordict: TensorDictBase, *, seed: int | None = None, timeout: float | None = None
    ) -> AsyncAnswerStream[TensorDictBase]:
        """Return what `stream` does for ``async for``, without ever blocking the event loop.

        The request is made, and all errors are raised, while reading. Cancelling the task ends the request.
        """
        return AsyncAnswerStream(self.backend, partial(self._plan, tensordict, seed, timeout))

    def _plan(
        self, tensordict: TensorDictBase, seed: int | None, timeout: float | None, listener: Listener
    ) -> tuple[PreparedCall[GenerateResult], Callable[[GenerateResult], TensorDictBase]]:
        if not self.options.generate:
            raise validate.invalid("generate", "only answers can be streamed, and this policy scores; call it instead")
        rows, call = self._prepare(tensordict, seed, timeout, listener)
        return call, partial(self._finish, tensordict, rows)

    def _bar(self, progress: bool) -> AbstractContextManager[AnswerBar | None]:
        if progress and not self.options.generate:
            raise validate.invalid("progress", "the bar counts answers, and this policy scores; leave it out")
        return answer_bar(progress)

    @abstractmethod
    def _prepare(
        self,
        td: TensorDictBase,
        seed: int | None,
        timeout: float | None,
        on_tokens: Listener | None = None,
        bar: AnswerBar | None = None,
        continue_from: TensorDictBase | None = None,
    ) -> tuple[InputRows, PreparedCall[Any]]: ...

    @abstractmethod
    def _finish(self, td: TensorDictBase, rows: InputRows, result: GenerateResult | ScoreResult) -> TensorDictBase: ...


def batched(backend: Backend, batching: bool | Limits) -> DynamicBatcher:
    """Return a batcher in front of the backend. A batcher that is already there is shared."""
    limits = batching if isinstance(batching, Limits) else None
    if not isinstance(backend, DynamicBatcher):
        return DynamicBatcher(backend, limits)
    if limits is not None and limits != backend.limits:
        raise validate.invalid(
            "batching", "this backend already has a batcher with other limits; pass batching=True to share it as it is"
        )
    return backend
