"""An engine that streams one token a step, waits for a test before each of them, and can be aborted."""

import io
import threading
from collections.abc import Callable
from typing import Any

import torch

from corelm import Backend, Ragged, hookimpl
from corelm.spec import AbortRequest, GenerateRequest, GenerateResult, TokenChunk
from helpers.batching_fakes import LONG, POISON
from helpers.fakes import Fake


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, and keeps what is written."""

    def isatty(self) -> bool:
        return True


class Dripping(Fake):
    """Repeats the last id of each prompt, with a log-prob of minus the number of the step.

    Args:
        steps: the number of steps that it may take at first; None for any number.
        bend: changes a chunk before it is handed over.
        capabilities: replace those of `Fake`.

    Attributes:
        calls: the requests, in order of arrival.
        aborted: the names of the requests that it was told to abort.
        taken: the number of steps that it has taken.
        fails_after: the number of steps after which a call fails that a poisoned prompt is in.
    """

    def __init__(
        self, steps: int | None = None, bend: Callable[[TokenChunk], Any] = lambda chunk: chunk, **capabilities: Any
    ) -> None:
        super().__init__(**{"streaming": True, **capabilities})
        self.calls: list[GenerateRequest] = []
        self.aborted: set[str] = set()
        self.taken, self.fails_after = 0, 1
        self._bend_chunk = bend
        self._allowed = steps
        self._changed = threading.Condition()

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        with self._changed:
            self.calls.append(request)
            self._changed.notify_all()
        prompts, names = request.prompts.tolist(), request.request_ids
        answers: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        for step in range(request.sampling.max_new_tokens or 1):
            if step == self.fails_after and any(prompt[0] == POISON for prompt in prompts):
                raise RuntimeError("poisoned")
            self._take_step(set(names))
            for row, prompt in enumerate(prompts):
                if names[row] in self.aborted:
                    continue
                answers[row].append(prompt[-1])
                logprobs[row].append(-float(step))
                chunk = TokenChunk(row=row, ids=[prompt[-1]], logprobs=[-float(step)])
                if request.on_tokens is not None:
                    request.on_tokens(self._bend_chunk(chunk))
        return GenerateResult(
            ids=Ragged.from_list(answers),
            logprobs=Ragged.from_list(logprobs, torch.float32),
            finish_reasons=tuple("abort" if name in self.aborted else "length" for name in names),
        )

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        with self._changed:
            self.aborted |= set(request.request_ids)
            self._changed.notify_all()
        return True

    def allow(self, steps: int | None) -> None:
        """Let it take so many more steps; None for any number."""
        with self._changed:
            self._allowed = None if steps is None or self._allowed is None else self._allowed + steps
            self._changed.notify_all()

    def wait_for_calls(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, LONG), "the engine was not called in time"

    def _take_step(self, names: set[str]) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: self._allowed is None or self._allowed > 0 or names <= self.aborted, LONG
            ), "the test did not allow the step"
            if self._allowed is not None and not names <= self.aborted:
                self._allowed -= 1
            self.taken += 1


def dripping(*args: Any, **capabilities: Any) -> Backend:
    """Return a `Backend` on a `Dripping`."""
    return Backend.from_plugin(Dripping(*args, **capabilities), "dripping")


def engine_of(backend: Backend) -> Dripping:
    engine: Dripping = backend.engine.plugin
    return engine
