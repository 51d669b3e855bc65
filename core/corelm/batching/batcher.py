"""`DynamicBatcher`: a backend whose callers share its forward passes, from any number of threads and tasks."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from corelm import validate
from corelm.backend.backend import Backend
from corelm.backend.prepared_call import B, PreparedCall, prepare_generation, prepare_scoring
from corelm.batching.dispatcher import Call, Dispatcher
from corelm.batching.futures import settle
from corelm.batching.merging import sharing_key
from corelm.batching.scheduling import Limits, queue_for
from corelm.errors import EngineError
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.modes import no_inference_mode
from corelm.tensors.ragged import Ragged

#: Seconds that an interpreter which ends waits for a call under way.
PATIENCE_AT_EXIT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingState:
    """What a batcher is doing at this moment.

    Attributes:
        queued: requests that wait, of `queued_rows` and `queued_tokens`. outside: of these, the ones that `max_queue`
            keeps out of the queue proper. oldest_wait: seconds, 0.0 if nobody waits.
        in_flight: requests in the engine.
        batches: calls to the engine so far. settled: requests answered, failed or cancelled so far.
        threads: of the batcher, alive.
    """

    queued: int
    queued_rows: int
    queued_tokens: int
    outside: int
    oldest_wait: float
    in_flight: int
    batches: int
    settled: int
    threads: int
    closed: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class DynamicBatcher(Backend):
    """Stands in front of an opened `Backend`, with its façade: whatever takes a backend takes a batched one.

    Requests with equal execution parameters (all but prompts and seeds) share a call, first in, first out, within the
    `Limits`. A request's own mistakes are found before it is queued, and what fails in the engine fails alone. Sharing
    changes no answer: the seeds are those that the request would have had by itself. (That is so in float32. In lower
    precision the other rows of a batch can change a sum's last bits.)

    One thread calls an engine that takes one call at a time. An engine that declares `concurrent_calls` batches by
    itself: there every request is a call of its own, and the limits bound what is in flight.

    Scoring with gradients or logits goes alone, in its turn; `score_logprobs` then runs it on its caller's own thread,
    where autograd's settings are. `update_weights` waits for what came before it, and what comes later waits for it;
    with ``drain=False`` it does not wait in the queue.

    A request's timeout starts when the request is made. Requests that share a call give it the time of the one that has
    most, and each fails when its own is over. ``Backend(retry=…)`` repeats a shared call as a whole.

    Args:
        min_batch_size, max_batch_size, max_batch_tokens, batching_timeout, max_queue, on_full: see `Limits`; None
            stands for its default.
        clock: seconds, never going back.

    Raises:
        InvalidRequestError: an argument that is not legal; `field` names it.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        max_batch_tokens: int | None = None,
        batching_timeout: float | None = None,
        max_queue: int | None = None,
        on_full: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # A second façade on the same engine: what is not said below is the same in both.
        if isinstance(backend, DynamicBatcher) or not isinstance(backend, Backend):
            raise validate.invalid("backend", f"expected an opened backend that is not batched, got {backend!r}")
        self.backend = backend
        self.limits = Limits.of(
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            batching_timeout=batching_timeout,
            max_queue=max_queue,
            on_full=on_full,
        )
        self.name, self.model_name, self.timeout = backend.name, backend.model_name, backend.timeout
        self._engine, self._hooks = backend._engine, backend._hooks
        concurrent = backend.capabilities.concurrent_calls
        workers = self.limits.max_batch_size if concurrent else 1
        self._dispatcher = Dispatcher(backend, queue_for(self.limits, concurrent), workers, clock)
        _DISPATCHERS.add(self._dispatcher)
        weakref.finalize(self, self._dispatcher.abandon).atexit = False

    @property
    def weight_version(self) -> str:
        return self.backend.weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        self.backend.weight_version = version

    def __repr__(self) -> str:
        return f"DynamicBatcher({self.backend!r})"

    # Asking it -------------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Any, sampling: SamplingParams | Mapping[str, Any] | None = None, **options: Any
    ) -> GenerateResult:
        """As `Backend.generate`, with the same options."""
        return self._wait(prepare_generation(self.backend, prompts, sampling, **options))

    def submit_generate(
        self, prompts: Any, sampling: SamplingParams | Mapping[str, Any] | None = None, **options: Any
    ) -> Future[GenerateResult]:
        """As `generate`, without waiting for the answer. Where the queue is full, it waits for room.

        Cancelling the future takes the request out of the queue, or ends it in an engine that can abort; in another one
        its answer is dropped. The future's callbacks run on a thread of the batcher: they should not take long.

        Raises:
            InvalidRequestError, CapabilityError: as `Backend.generate`, here and not from the future.
            QueueFullError: there is no room, with ``on_full="raise"``.
        """
        return self.send(prepare_generation(self.backend, prompts, sampling, **options))

    def score_logprobs(self, sequences: Any, **options: Any) -> ScoreResult:
        """As `Backend.score_logprobs`, with the same options."""
        prepared = prepare_scoring(self.backend, sequences, **options)
        if sharing_key(prepared) is not None or not prepared.rows:
            return self._wait(prepared)
        turn = Call(
            prepared=None,
            owner=self,
            rows=prepared.rows,
            tokens=prepared.tokens,
            timeout=prepared.request.timeout,
        )
        with self._dispatcher.turn(turn):
            return prepared.run(self._hooks, self._dispatcher.left([turn]))

    def submit_score_logprobs(self, sequences: Any, **options: Any) -> Future[ScoreResult]:
        """As `score_logprobs`, without waiting for the scores; see `submit_generate`."""
        return self.send(prepare_scoring(self.backend, sequences, **options))

    def send(self, prepared: PreparedCall[B], *, block: bool = True) -> Future[B]:
        """Queue a request that is prepared. `block`: whether this thread may be kept waiting for room in the queue."""
        if not prepared.rows:
            done: Future[B] = Future()
            done.set_result(prepared.run(self._hooks))
            return done
        call = Call(
            prepared=prepared,
            owner=self,
            rows=prepared.rows,
            tokens=prepared.tokens,
            key=sharing_key(prepared),
            timeout=prepared.request.timeout,
        )
        return self._dispatcher.submit(call, block)

    def _wait(self, prepared: PreparedCall[B]) -> B:
        if self._dispatcher.mine:
            # Asked by a callback or a wrapper, on a thread that would wait for itself.
            return prepared.run(self._hooks)
        future = self.send(prepared, block=False)
        try:
            return future.result()
        finally:
            # A wait that was interrupted is nobody's any more.
            future.cancel()
            del future

    # Its life --------------------------------------------------------------------------------------------------------

    def update_weights(
        self, weights: Mapping[str, Tensor] | str | os.PathLike[str], version: str | None = None, drain: bool = True
    ) -> str:
        """As `Backend.update_weights`; with `drain`, in its turn among the requests."""
        if not drain:
            return self.backend.update_weights(weights, version, drain)
        turn = Call(prepared=None, owner=self, rows=self.limits.max_batch_size, tokens=0, barrier=True)
        with self._dispatcher.turn(turn):
            return self.backend.update_weights(weights, version, drain)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; answers return what they have with the finish reason `abort`.

        A request that still waits is ended if all of its rows are named; one that is to be scored fails.
        """
        self._needs("abort", "its requests cannot be aborted")
        names = frozenset(request_ids)
        for call in self._dispatcher.withdraw(lambda prepared: names.issuperset(prepared.request.request_ids)):
            assert call.prepared is not None
            try:
                settle(call.future, _aborted(call.prepared))
            except EngineError as error:
                settle(call.future, error=error)
        self.backend.abort(request_ids)

    def cleanup(self, *, flush: bool = True) -> None:
        """Answer what is waiting, or fail it with `BackendClosedError`, and end the threads. The engine stays open,
        and a later request starts a thread again.
        """
        self._dispatcher.stop(flush=flush, final=False)

    def close(self, *, flush: bool = True) -> None:
        """Answer what is waiting, or fail it with `BackendClosedError`; end the threads; close the engine.

        Without `flush`, calls under way are aborted in an engine that can, and finished in another.
        """
        try:
            self._dispatcher.stop(flush=flush, final=True)
        finally:
            self.backend.close()

    def __enter__(self) -> DynamicBatcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(flush=exc[0] is None)

    def state(self) -> BatchingState:
        dispatcher = self._dispatcher
        with dispatcher.lock:
            queued = list(dispatcher.queue)
            return BatchingState(
                queued=len(queued),
                queued_rows=sum(call.rows for call in queued),
                queued_tokens=sum(call.tokens for call in queued),
                outside=len(dispatcher.queue.outside),
                oldest_wait=max(0.0, dispatcher.clock() - queued[0].arrived) if queued else 0.0,
                in_flight=len(dispatcher.in_flight),
                batches=dispatcher.batches,
                settled=dispatcher.settled,
                threads=len(dispatcher.threads()),
                closed=dispatcher.closed,
            )


@no_inference_mode()
def _aborted(prepared: PreparedCall[Any]) -> GenerateResult:
    """Empty answers, each ended by `abort`."""
    request = prepared.request
    if not isinstance(request, GenerateRequest):
        raise EngineError("the request was aborted before it was scored", usable=True)
    nothing = torch.zeros(prepared.rows, dtype=torch.int64)
    processed = request.logprobs == "processed"
    batch: GenerateResult = prepared.finish(
        GenerateResult(
            ids=Ragged(torch.zeros(0, dtype=torch.int64), nothing),
            logprobs=Ragged(torch.zeros(0), nothing),
            finish_reasons=("abort",) * prepared.rows,
            mode="processed" if processed else "raw",
            temperature=request.sampling.temperature if processed else 1.0,
            support="truncated" if processed and request.sampling.truncates else "full",
        )
    )
    return batch


_DISPATCHERS: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # A daemon thread inside an engine while the interpreter is taken down could crash it.
    for dispatcher in list(_DISPATCHERS):
        dispatcher.stop(flush=False, final=True, patience=PATIENCE_AT_EXIT)
