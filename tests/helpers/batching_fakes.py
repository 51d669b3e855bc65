"""A fake engine whose calls wait until a test releases them, and whose answers identify their request."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from corelm import Backend, Ragged, hookimpl
from corelm.backend.arguments import answer_seeds
from corelm.batching import DynamicBatcher, Limits
from corelm.spec.records import AbortRequest, GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from helpers.fakes import SHORT, VOCAB, Fake

#: Seconds after which a wait fails the test. Nothing takes that long.
LONG = 20.0
SEEDED = {**SHORT, "seed": 7}
#: A prompt that starts with this id makes its call fail.
POISON = 13


def answer(prompt: list[int], seed: int, new: int, temperature: float) -> list[int]:
    """Return the answer of `GatedEngine`: ids that depend on prompt, seed and temperature; none is EOS."""
    mixed = sum((i + 1) * token for i, token in enumerate(prompt)) + seed % 1009 + round(10 * temperature)
    return [3 + (mixed + step) % (VOCAB - 3) for step in range(new)]


def lone_answer(prompt: list[int], seed: int = 7, new: int = 2, temperature: float = 1.0) -> list[int]:
    """Return the answer of `GatedEngine` to a request with one prompt."""
    return answer(prompt, int(answer_seeds(seed, [0])), new, temperature)


class GatedEngine(Fake):
    """An engine whose calls each wait for a permit: `release` gives permits, `free` lets all later calls through.

    Args:
        permits: the number of calls to let through at first; None lets all through.
        error: what a call raises that a poisoned prompt is in.
        capabilities: replace those of `Fake`.

    Attributes:
        calls: the requests, in order of arrival.
        inside: how many calls are running now.
        most_inside: the largest number of calls that ran at the same time.
        aborted: the request ids that the engine was told to abort.
        alive: what the `health` hook returns.
    """

    def __init__(self, permits: int | None = None, error: Exception | None = None, **capabilities: Any) -> None:
        super().__init__(**capabilities)
        self.calls: list[GenerateRequest | ScoreRequest] = []
        self.inside = self.most_inside = 0
        self.aborted: set[str] = set()
        self.alive = True
        self.error = error or RuntimeError("poisoned")
        self._permits, self._free = permits or 0, permits is None
        self._changed = threading.Condition()

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        cut = self.wait_for_permit(request)
        prompts, sampling = request.prompts.tolist(), request.sampling
        seeds = [0] * len(prompts) if request.seeds is None else request.seeds.tolist()
        new = sampling.max_new_tokens or 1
        ids = [
            [] if name in cut else answer(prompt, seed, new, sampling.temperature)
            for prompt, seed, name in zip(prompts, seeds, request.request_ids, strict=True)
        ]
        rows = Ragged.from_list(ids)
        return GenerateResult(
            ids=rows,
            logprobs=Ragged(-rows.values.float(), rows.lengths),
            finish_reasons=tuple("abort" if name in cut else "length" for name in request.request_ids),
        )

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        self.wait_for_permit(request)
        rows = request.sequences
        scored = rows.positions >= request.score_from[rows.row_index]
        values = torch.where(scored, -rows.values.float() / request.temperature, 0.0)
        if request.grad:
            values = values * torch.ones((), requires_grad=True)
        return ScoreResult(
            logprobs=Ragged(values, rows.lengths),
            scored=Ragged(scored, rows.lengths),
            mode="raw" if request.temperature == 1.0 else "processed",
            temperature=request.temperature,
        )

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        with self._changed:
            self.aborted |= set(request.request_ids)
            self._changed.notify_all()
        return True

    @hookimpl
    def health(self, request: Any) -> bool:
        return self.alive

    def release(self, permits: int = 1) -> None:
        with self._changed:
            self._permits += permits
            self._changed.notify_all()

    def free(self) -> None:
        with self._changed:
            self._free = True
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, LONG), "the engine was not called in time"

    def wait_for_calls(self, count: int) -> None:
        self.wait_for(lambda: len(self.calls) >= count)

    def wait_for_permit(self, request: GenerateRequest | ScoreRequest) -> set[str]:
        """Wait for a permit and return the request ids that were aborted meanwhile."""
        names = set(request.request_ids)
        rows = request.prompts if isinstance(request, GenerateRequest) else request.sequences
        with self._changed:
            self.calls.append(request)
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._free or self._permits > 0 or names <= self.aborted, LONG)
                if not self._free and not names <= self.aborted:
                    self._permits -= 1
            finally:
                self.inside -= 1
                self._changed.notify_all()
        if any(row[0] == POISON for row in rows.tolist()):
            raise self.error
        return names & self.aborted


class Clock:
    """A clock that stands still until a test changes `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def open_batcher(
    engine: GatedEngine, *, clock: Callable[[], float] = time.monotonic, **limits: Any
) -> Iterator[DynamicBatcher]:
    """Yield a batcher in front of the engine. Afterwards, assert that no thread is left and no future is pending."""
    with DynamicBatcher(Backend.from_plugin(engine, "gated"), Limits(**limits), clock=clock) as batcher:
        try:
            yield batcher
        finally:
            engine.free()
    state = batcher.state()
    assert state.threads == state.queued == state.in_flight == 0


def ids(result: Future | object) -> list[list[int]]:
    """Return the ids of a result, or of the result that a future will hold."""
    batch = result.result(LONG) if isinstance(result, Future) else result
    return batch.ids.tolist()


def hold_one(engine: GatedEngine, batcher: DynamicBatcher) -> Future:
    """Submit a request that stays in the engine, so that later requests must queue."""
    first = batcher.submit_generate([[3]], SEEDED)
    engine.wait_for_calls(1)
    return first


def corelm_threads() -> list[threading.Thread]:
    """Return core's threads, without those of hosts: other tests leave some that wait for the end of a process."""
    names = ((each, each.name) for each in threading.enumerate())
    return [each for each, name in names if name.startswith("corelm") and not name.startswith("corelm-host")]


def join_threads(threads: Iterable[threading.Thread]) -> None:
    """Wait until the threads have ended."""
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


def rows_of(call: GenerateRequest | ScoreRequest) -> list[list[int]]:
    """Return the token ids that the engine was sent."""
    return (call.prompts if isinstance(call, GenerateRequest) else call.sequences).tolist()


def all_capabilities(**capabilities: Any) -> dict[str, Any]:
    """Return capabilities that declare everything `GatedEngine` can do."""
    return {"abort": True, "gradients": True, "score_temperature": False, **capabilities}


def returns(function: Callable[[], object]) -> bool:
    """Call a function on a thread, and return whether it comes back within `LONG` seconds."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(LONG)
    return not thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, by polling."""
    end, pause = time.monotonic() + LONG, threading.Event()
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        pause.wait(0.001)


def no_room_for(name: str) -> Callable[[threading.Thread], None]:
    """Return a `threading.Thread.start` that fails, as on a full system, for threads whose names start with `name`."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    return refuse
