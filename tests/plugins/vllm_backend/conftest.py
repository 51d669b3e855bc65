"""A server that speaks as vLLM's does, over a model that is a formula, and which can be made to misbehave."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import corelm
from corelm import Backend
from helpers.http_server import FaultServer, Reply, Request, json_reply
from helpers.tiny_models import tiny_tokenizer
from vllm_backend.completions import EXPLICIT, NEUTRAL

VOCAB, CONTEXT = 512, 64
FIELDS = {*NEUTRAL, *EXPLICIT, "model", "prompt", "logprobs", "prompt_logprobs", "logprob_token_ids", "request_id"}


def logprobs(ids: list[int], temperature: float = 1.0) -> list[float]:
    """Of what follows `ids`: it depends on all of them, and is far from flat."""
    stream = random.Random(str(ids))
    values = [stream.gauss(0.0, 1.5) / temperature for _ in range(VOCAB)]
    total = math.log(sum(map(math.exp, values)))
    return [value - total for value in values]


class FakeVLLM:
    """Call it with a request: an answer for `FaultServer`.

    Attributes:
        mode: of the log-probs. unknown: fields of a request that it ignores in silence.
        spoil: changes a choice before it is sent. fault: a reply to give to a request instead, or None.
        pages: what GET routes say.
    """

    logprobs = staticmethod(logprobs)

    def __init__(self) -> None:
        self.mode = "raw"
        self.unknown: set[str] = set()
        self.spoil: Callable[[dict[str, Any]], Any] = lambda choice: None
        self.fault: Callable[[Request], Reply | None] = lambda request: None
        schema = {"properties": {name: {} for name in FIELDS}}
        self.pages: dict[str, Any] = {
            "/openapi.json": {
                "paths": {"/v1/completions": {}},
                "components": {"schemas": {"CompletionRequest": schema}},
            },
            "/v1/models": {"data": [{"id": "fake", "root": "/nowhere/to-be/read", "max_model_len": CONTEXT}]},
            "/health": {},
        }

    def __call__(self, request: Request) -> Reply:
        fault = self.fault(request)
        if fault is not None:
            return fault
        if request.path in self.pages:
            return json_reply(self.pages[request.path])
        if request.path != "/v1/completions":
            return json_reply({"detail": "Not Found"}, 404)
        asked = {name: value for name, value in request.body.items() if name not in self.unknown}
        choice = self._complete(asked)
        self.spoil(choice)
        return json_reply({"id": "cmpl", "choices": [choice]})

    def _complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt = asked["prompt"]
        heat = asked["temperature"] or 1.0
        stream = random.Random(str((prompt, asked.get("seed", random.random()))))
        ids: list[int] = []
        values: list[dict[str, float]] = []
        reason = "length"
        while len(ids) < asked["max_tokens"]:
            weights = [math.exp(value) for value in logprobs([*prompt, *ids], heat)]
            best = max(range(VOCAB), key=weights.__getitem__)
            token = stream.choices(range(VOCAB), weights)[0] if asked["temperature"] else best
            table = logprobs([*prompt, *ids], heat if self.mode == "processed" else 1.0)
            ranked = sorted(range(VOCAB), key=table.__getitem__, reverse=True)[: asked.get("logprobs") or 0]
            named = asked.get("logprob_token_ids", ())
            values.append({f"token_id:{i}": table[i] for i in dict.fromkeys([token, *named, *ranked])})
            ids.append(token)
            text = tiny_tokenizer().decode(ids, skip_special_tokens=True)
            if token in asked.get("stop_token_ids", ()) or any(stop in text for stop in asked.get("stop", ())):
                reason = "stop"
                break
        choice: dict[str, Any] = {"finish_reason": reason, "text": "", "logprobs": None}
        if asked.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        if "logprobs" in asked:
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in ids],
                "token_logprobs": [table[f"token_id:{i}"] for i, table in zip(ids, values, strict=True)],
                "top_logprobs": values,
            }
        if "prompt_logprobs" in asked:
            given = [{str(prompt[t]): {"logprob": logprobs(prompt[:t])[prompt[t]]}} for t in range(1, len(prompt))]
            choice["prompt_logprobs"] = [None, *given]
        return choice


@pytest.fixture
def fake() -> FakeVLLM:
    return FakeVLLM()


@pytest.fixture
def server(fake: FakeVLLM) -> Iterator[FaultServer]:
    with FaultServer(fake) as running:
        yield running


@pytest.fixture
def connect(server: FaultServer) -> Iterator[Callable[..., Backend]]:
    """``connect(**options)``: the backend on the fake server; closed afterwards."""
    with ExitStack() as stack:

        def make(**options: Any) -> Backend:
            given = {"tokenizer": tiny_tokenizer(), "vocab_size": VOCAB, **options}
            return stack.enter_context(corelm.get_backend("vllm", base_url=server.url, **given))

        yield make
