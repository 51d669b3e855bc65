"""An engine without a model, for faults that cannot be provoked in a real one. A test defines its results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from corelm import Backend, Capabilities, Ragged, hookimpl
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult

VOCAB, CONTEXT, EOS = 16, 12, 2
SHORT = {"max_new_tokens": 2}


class Digits:
    """A tokenizer of single hexadecimal digits: "3a" is [3, 10]."""

    eos_token_id, pad_token_id = EOS, 0

    def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
        return {"input_ids": [[int(c, 16) for c in text] for text in texts]}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{i:x}" for i in ids if not (skip_special_tokens and i == EOS))


class Gate:
    """A `bend` for `Fake` that holds a call in the engine until `opened` is set.

    Attributes:
        entered: set as soon as a call is in the engine.
        opened: set it to let calls end.
    """

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, result: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(timeout=10), "the test did not open the gate"
        return result

    def wait_for_call(self) -> None:
        assert self.entered.wait(timeout=10), "no call reached the engine"


class Fake:
    """Repeat each prompt's last id `max_new_tokens` times, with log-probs of -1, then apply `bend` to the result."""

    requires_api = ">=1,<2"
    tokenizer = Digits()
    capabilities = Capabilities(
        vocab_size=VOCAB,
        max_context=CONTEXT,
        sampling={"temperature": (0.0, 2.0), "stop": None},
        generation_modes=frozenset({"raw"}),
        score=True,
        per_answer_seeds=True,
        update_weights=True,
    )

    def __init__(self, bend: Callable[[Any], Any] = lambda batch: batch, **capabilities: Any) -> None:
        self.bend = bend
        self.requests: list[Any] = []
        self.updated = True
        self.capabilities = replace(type(self).capabilities, **capabilities)

    @classmethod
    def open(cls, model: Any = None) -> Fake:
        return cls()

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        new = request.sampling.max_new_tokens or 1
        ids = Ragged.from_list([[row[-1]] * new for row in request.prompts.tolist()])
        logprobs = Ragged.full(ids.lengths, -1.0, torch.float32)
        return self.bend(GenerateResult(ids=ids, logprobs=logprobs, finish_reasons=("length",) * len(ids)))

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        self.requests.append(request)
        rows = request.sequences
        scored = rows.positions >= request.score_from[rows.row_index]
        return self.bend(
            ScoreResult(logprobs=Ragged(-scored.float(), rows.lengths), scored=Ragged(scored, rows.lengths))
        )

    @hookimpl
    def update_weights(self, request: Any) -> bool:
        self.requests.append(request)
        return self.updated

    @hookimpl
    def abort(self, request: Any) -> bool:
        return True


def fake(*args: Any, **capabilities: Any) -> Backend:
    """Return a `Backend` on a `Fake`."""
    return Backend.from_plugin(Fake(*args, **capabilities), "fake")


def sent(backend: Backend) -> list[Any]:
    """Return the requests that the fake received."""
    return backend.engine.plugin.requests
