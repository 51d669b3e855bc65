"""`FakeOpenAI`: imitates servers of the OpenAI protocol of other makes, which cannot run here, and makes their faults.

It answers with a tiny model that writes letters. What it honours and how it reports tokens is chosen; the numbers are
those of a plain forward pass.
"""

import functools
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from helpers import oracle
from helpers.http_server import Reply, Request, json_reply
from helpers.letters import EOS, VOCAB, letter_model, letter_tokenizer

MODEL = "letters"
#: What every server of the protocol knows.
PROTOCOL = frozenset(
    {"model", "prompt", "max_tokens", "temperature", "top_p", "logprobs", "stop", "logit_bias", "seed"}
)
PENALTIES = frozenset({"presence_penalty", "frequency_penalty"})


class FakeOpenAI:
    """Answers requests; ``FaultServer(FakeOpenAI(...))`` serves them.

    Args:
        knows: the fields that have an effect.
        strict: refuse fields that are not known; otherwise they are ignored.
        takes_ids: read prompts that are lists of ids.
        states_ids: replies have ``token_ids``.
        names: how log-probs name tokens: "id", "text", "entry", or "content", the form of llama.cpp; "" for no
            log-probs.
        mode: the distribution of the log-probs: "raw", "scaled" or "processed"; "penalised": raw but for penalties;
            "truncated": raw but for top-p; "unpenalised": processed but for penalties; "divided": not normalised.
        says_eos: EOS is among the tokens.
        echoes: score prompts, with ``max_tokens`` of at least this; None scores none.
        chats_only: have no completions.
        swaps_penalties: a penalty divides or multiplies logits, as a repetition penalty does.
        tokenizer: that of the server, if another one than the letters'.
        ends: the model ends its answers.
        model: a model that writes letters, if not that of `letter_model`.

    Attributes:
        change: called with each completion before it is sent; may change it, or return another reply.
        pause: called before a completion is computed.
    """

    def __init__(
        self,
        *,
        knows: frozenset[str] = PROTOCOL,
        strict: bool = False,
        takes_ids: bool = True,
        states_ids: bool = False,
        names: str = "text",
        mode: str = "raw",
        says_eos: bool = True,
        echoes: int | None = None,
        chats_only: bool = False,
        swaps_penalties: bool = False,
        tokenizer: Any = None,
        ends: bool = True,
        model: nn.Module | None = None,
    ) -> None:
        self.knows = knows | (frozenset({"echo"}) if echoes is not None else frozenset())
        self.strict, self.takes_ids, self.states_ids = strict, takes_ids, states_ids
        self.names, self.mode, self.says_eos, self.echoes = names, mode, says_eos, echoes
        self.chats_only, self.swaps_penalties = chats_only, swaps_penalties
        self.tokenizer = tokenizer or letter_tokenizer()
        self.model = model or _shared_model(ends)
        # Backends try servers of all makes with the same prompts: what the model says to each is computed once.
        self._next = _NEXT[ends] if model is None else {}
        self.change: Callable[[Any, dict[str, Any]], Reply | None] = lambda body, reply: None
        self.pause: Callable[[], object] = lambda: None
        self._numbers = itertools.count(1000)
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Reply:
        if request.path == "/v1/models":
            return json_reply({"data": [{"id": MODEL, "max_model_len": 256}]})
        if request.path != "/v1/completions" or self.chats_only:
            return json_reply({"error": {"message": "Not Found"}}, 404)
        body = request.body
        unknown = sorted(body.keys() - self.knows)
        if self.strict and unknown:
            return json_reply({"error": {"message": f"Unrecognized request argument: {unknown[0]}"}}, 400)
        prompt = body["prompt"]
        if not isinstance(prompt, str) and not self.takes_ids:
            return json_reply({"error": {"message": "prompt must be a string"}}, 400)
        if not isinstance(prompt, str) and not all(0 <= token < VOCAB for token in prompt):
            return json_reply({"error": {"message": "an id is outside the vocabulary"}}, 400)
        if body["max_tokens"] < (self.echoes or 0 if body.get("echo") else 1):
            return json_reply({"error": {"message": "max_tokens is too small"}}, 400)
        self.pause()
        with self._lock:
            reply = self._completion({name: value for name, value in body.items() if name in self.knows})
        return self.change(body, reply) or json_reply(reply)

    def _completion(self, body: Mapping[str, Any]) -> dict[str, Any]:
        given = body["prompt"]
        prompt = self.tokenizer([given])["input_ids"][0] if isinstance(given, str) else given
        ids, steps, reason = self._sampled(prompt, body)
        told = len(ids) - (1 if reason == "stop" and ids[-1:] == [EOS] and not self.says_eos else 0)
        text = self.tokenizer.decode(ids[:told], skip_special_tokens=True)
        for stop in body.get("stop") or []:
            text = text.partition(stop)[0]
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
        if self.states_ids:
            choice |= {"token_ids": ids[:told], "prompt_token_ids": prompt}
        if self.names and "logprobs" in body:
            reported, tables = ids[:told], steps[:told]
            if body.get("echo"):
                first = oracle.next_logits(self.model, prompt).log_softmax(-1)
                reported, tables = [*prompt, *reported], [None, *first[:-1], *tables]
            choice["logprobs"] = self._logprobs(reported, tables, body["logprobs"])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return {"id": "cmpl-1", "choices": [choice], "usage": usage}

    def _sampled(self, prompt: Sequence[int], body: Mapping[str, Any]) -> tuple[list[int], list[Tensor], str]:
        """Return the ids of an answer, the reported log-probs[V] at each, and why it ended."""
        generator = torch.Generator().manual_seed(body.get("seed") or next(self._numbers))
        ids: list[int] = []
        steps = []
        stop_ids = {*body.get("stop_token_ids", ()), *(() if body.get("ignore_eos") else (EOS,))}
        heat = body.get("temperature", 1.0)
        while len(ids) < body["max_tokens"]:
            raw = self._next_logits((*prompt, *ids)).clone()
            if body.get("even_ids_only"):
                # As a grammar does: it is in force before any log-prob is computed.
                raw[1::2] = -math.inf
            logits, counts = raw.clone(), Counter(ids)
            for token, bias in body.get("logit_bias", {}).items():
                logits[int(token)] += bias
            for token, times in counts.items():
                if self.swaps_penalties:
                    by = 1 + body.get("frequency_penalty", 0.0) + body.get("presence_penalty", 0.0)
                    logits[token] *= by if logits[token] < 0 else 1 / by
                    continue
                logits[token] -= body.get("frequency_penalty", 0.0) * times + body.get("presence_penalty", 0.0)
            scaled = logits / (heat or 1.0)
            top_p = body.get("top_p", 1.0)
            drawn = _truncated(scaled, top_p)
            kinds = {"raw": raw, "penalised": logits, "scaled": scaled, "processed": drawn, "divided": raw}
            kinds |= {"truncated": _truncated(raw, top_p), "unpenalised": _truncated(raw / (heat or 1.0), top_p)}
            reported = kinds[self.mode].log_softmax(-1) / ((heat or 1.0) if self.mode == "divided" else 1.0)
            mass = drawn.softmax(-1)
            ids.append(int(drawn.argmax() if heat == 0 else torch.multinomial(mass, 1, generator=generator)))
            steps.append(reported)
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            if ids[-1] in stop_ids or any(stop in text for stop in body.get("stop") or ()):
                return ids, steps, "stop"
        return ids, steps, "length"

    def _next_logits(self, ids: tuple[int, ...]) -> Tensor:
        if ids not in self._next:
            self._next[ids] = oracle.next_logits(self.model, ids)[-1]
        return self._next[ids]

    def _logprobs(self, ids: Sequence[int], tables: Sequence[Tensor | None], count: int) -> dict[str, Any]:
        if self.names == "content":
            entry = lambda token, table: {  # noqa: E731
                "id": token,
                "token": self.tokenizer.decode([token]),
                "logprob": _number(table, token),
            }
            return {
                "content": [
                    entry(token, table) | {"top_logprobs": [entry(each, table) for each in _best(table, count)]}
                    for token, table in zip(ids, tables, strict=True)
                ]
            }
        return {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": [_number(table, token) for token, table in zip(ids, tables, strict=True)],
            "top_logprobs": [
                {self._name(each): _number(table, each) for each in _best(table, count)} or None for table in tables
            ],
        }

    def _name(self, token: int) -> str:
        if self.names == "id":
            return f"token_id:{token}"
        return self.tokenizer.convert_ids_to_tokens(token) if self.names == "entry" else self.tokenizer.decode([token])


#: The logits[V] after each row of ids, by whether the model ends its answers.
_NEXT: dict[bool, dict[tuple[int, ...], Tensor]] = {False: {}, True: {}}


@functools.cache
def _shared_model(ends: bool) -> nn.Module:
    return letter_model(ends=ends)


def _truncated(logits: Tensor, top_p: float) -> Tensor:
    order = logits.argsort(descending=True)
    mass = logits.softmax(-1)[order]
    return logits.index_fill(0, order[mass.cumsum(0) - mass >= top_p], -math.inf) if top_p < 1 else logits


def _best(table: Tensor | None, count: int) -> list[int]:
    return [] if table is None else table.topk(count).indices.tolist()


def _number(table: Tensor | None, token: int) -> float | None:
    return None if table is None else max(float(table[token]), -9999.0)
