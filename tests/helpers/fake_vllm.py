"""`FakeVLLM`: a server that replies as vLLM's does, with a formula as its model. It can be told to misbehave."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from corelm import Backend
from helpers.http_server import Reply, Request, event_stream, json_reply
from helpers.tiny_models import tiny_tokenizer

VOCAB, CONTEXT = 512, 64

Connect = Callable[..., Backend]
#: Changes a choice of a completion in place; what it returns is not used.
Spoil = Callable[[dict[str, Any]], Any]

#: Three prompts, and sampling parameters under which their answers have four tokens.
PROMPTS = [[5, 17, 300], [8], [40, 41]]
SAMPLING = {"max_new_tokens": 4, "seed": 1, "ignore_eos": True}

#: The fields of a completion request that the server lists.
FIELDS = (
    *("model", "prompt", "request_id", "n", "stream", "seed", "max_tokens", "min_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
    *("logprobs", "prompt_logprobs", "logit_bias", "return_token_ids", "return_tokens_as_token_ids"),
)


def next_logprobs(ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return the log-probs of the token after `ids`. They depend on all of `ids`, and are far from uniform."""
    stream = random.Random(str(ids))
    values = [stream.gauss(0.0, 1.5) / temperature for _ in range(VOCAB)]
    total = math.log(sum(map(math.exp, values)))
    return [value - total for value in values]


def _candidates(ids: list[int], token: int, count: int) -> dict[str, dict[str, float]]:
    """Return `token` and the `count` most probable ids after `ids`, each with its log-prob and its rank."""
    logprobs = next_logprobs(ids)
    ranked = sorted(range(VOCAB), key=logprobs.__getitem__, reverse=True)
    return {str(i): {"logprob": logprobs[i], "rank": ranked.index(i) + 1} for i in [token, *ranked[:count]]}


class FakeVLLM:
    """Returns a reply to each request of a `FaultServer`.

    Attributes:
        mode: the kind of log-probs of sampled tokens, "raw" or "processed".
        max_logprobs: the most candidates that it returns at a position.
        ignored: fields of a request that it ignores silently.
        spoil: changes a choice before it is sent.
        fault: returns a reply to send instead, or None.
        pause: called with the number of each token before it is streamed.
        sends_usage: whether a stream has an event with the usage, and without an answer, before ``[DONE]``.
        pages: what its GET routes return.
    """

    def __init__(self) -> None:
        self.mode = "raw"
        self.max_logprobs = 20
        self.ignored: set[str] = set()
        self.spoil: Spoil = lambda choice: None
        self.fault: Callable[[Request], Reply | None] = lambda request: None
        self.pause: Callable[[int], object] = lambda step: None
        self.sends_usage = False
        self.pages: dict[str, Any] = {
            "/openapi.json": {
                "paths": {"/v1/completions": {}},
                "components": {"schemas": {"CompletionRequest": {"properties": {name: {} for name in FIELDS}}}},
            },
            "/v1/models": {"data": [{"id": "fake", "root": "/nowhere/to-be/read", "max_model_len": CONTEXT}]},
            "/health": {},
        }

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a completion request, as the server lists them. May be changed."""
        properties: dict[str, Any] = self.pages["/openapi.json"]["components"]["schemas"]["CompletionRequest"][
            "properties"
        ]
        return properties

    def fail_row(self, row: int, reply: Reply) -> None:
        """Send `reply` once, to the next request whose prompt is ``PROMPTS[row]``."""
        pending = [reply]

        def fault(request: Request) -> Reply | None:
            matches = request.method == "POST" and request.body.get("prompt") == PROMPTS[row]
            return pending.pop() if matches and pending else None

        self.fault = fault

    def __call__(self, request: Request) -> Reply:
        fault = self.fault(request)
        if fault is not None:
            return fault
        if request.path in self.pages:
            return json_reply(self.pages[request.path])
        if request.path != "/v1/completions":
            return json_reply({"detail": "Not Found"}, 404)
        asked = max(request.body.get(name) or 0 for name in ("logprobs", "prompt_logprobs"))
        if asked > self.max_logprobs:
            message = f"Requested sample logprobs of {asked}, which is greater than max allowed: {self.max_logprobs}"
            return json_reply({"error": {"message": message, "type": "BadRequestError", "code": 400}}, 400)
        choice = self._complete({name: value for name, value in request.body.items() if name not in self.ignored})
        self.spoil(choice)
        name = f"cmpl-{request.body['request_id']}"
        if request.body.get("stream") and "stream" not in self.ignored:
            usage = [{"id": name, "choices": [], "usage": {}}] if self.sends_usage else []
            return event_stream(chain(({"id": name, "choices": [part]} for part in self._parts(choice)), usage))
        return json_reply({"id": name, "choices": [choice]})

    def _parts(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield one part of a choice for each token, as the server streams them."""
        last = len(choice["token_ids"]) - 1
        for step, token in enumerate(choice["token_ids"]):
            self.pause(step)
            part = {"finish_reason": choice["finish_reason"] if step == last else None, "text": "", "logprobs": None}
            if choice["logprobs"]:
                part["logprobs"] = {label: values[step : step + 1] for label, values in choice["logprobs"].items()}
            if step == 0:
                part["prompt_token_ids"] = choice["prompt_token_ids"]
            yield {**part, "token_ids": [token]}

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        temperature = body["temperature"] or 1.0
        stream = random.Random(str((prompt, body.get("seed", random.random()))))
        ids: list[int] = []
        values: list[dict[str, float]] = []
        reason = "length"
        while len(ids) < body["max_tokens"]:
            weights = [math.exp(value) for value in next_logprobs([*prompt, *ids], temperature)]
            for named, bias in body.get("logit_bias", {}).items():
                weights[int(named)] *= math.exp(bias)
            likeliest = max(range(VOCAB), key=weights.__getitem__)
            token = stream.choices(range(VOCAB), weights)[0] if body["temperature"] else likeliest
            logprobs = next_logprobs([*prompt, *ids], temperature if self.mode == "processed" else 1.0)
            ranked = sorted(range(VOCAB), key=logprobs.__getitem__, reverse=True)[: body.get("logprobs") or 0]
            values.append({f"token_id:{i}": logprobs[i] for i in dict.fromkeys([token, *ranked])})
            ids.append(token)
            text = tiny_tokenizer().decode(ids, skip_special_tokens=True)
            if token in body.get("stop_token_ids", ()) or any(stop in text for stop in body.get("stop", ())):
                reason = "stop"
                break
        choice: dict[str, Any] = {"finish_reason": reason, "text": "", "logprobs": None}
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        if "logprobs" in body:
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in ids],
                "token_logprobs": [table[f"token_id:{i}"] for i, table in zip(ids, values, strict=True)],
                "top_logprobs": values,
            }
        if "prompt_logprobs" in body:
            scored = [_candidates(prompt[:t], prompt[t], body["prompt_logprobs"]) for t in range(1, len(prompt))]
            choice["prompt_logprobs"] = [None, *scored]
        return choice
