"""How much processor time an answer of a server costs its client, in microseconds a token.

A server in another process answers with bodies that were made before. They have the shape that a real vLLM server
(``/v1/completions``) and a real SGLang server (``/generate``) give them. Time of the server does not count.

    json        `json.loads` of the bodies, which is what any client in Python pays
    checks      replies that are decoded already: parsed, checked against their requests, made into tensors
    client      the whole call: requests written, bodies received and decoded, then the same checks
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.measure import Figure, compare
from benchmarks.models import tokenizer
from corelm import Ragged, SamplingParams
from corelm.spec import Capabilities, GenerateRequest, ScoreRequest
from corelm_engine_kit import HttpClient, HttpEngine, Secrets
from sglang_backend import SGLangBackend
from sglang_backend import protocol as sglang
from sglang_backend.capabilities import ServerInfo as SGLangInfo
from vllm_backend import protocol_http as vllm
from vllm_backend.capabilities_http import ServerInfo as VLLMInfo
from vllm_backend.server import VLLMServer

#: Goal: seconds of the client for a token.
GOAL = 0.5e-6
VOCAB = 151_936
PROMPT = 64
CAPABILITIES = Capabilities(vocab_size=VOCAB, max_context=1 << 16, eos_token_ids=frozenset({VOCAB - 1}))

Json = dict[str, Any]
E = TypeVar("E", bound=HttpEngine)


@dataclass(frozen=True)
class Call:
    """Rows that a server is asked for, and its replies.

    Attributes:
        path: where the requests are posted.
        payloads: one request for each row.
        bodies: the reply to each of them.
        parse: makes a result of the decoded replies.
        is_reply_to: whether a reply answers a request.
    """

    path: str
    payloads: list[Json]
    bodies: list[bytes]
    parse: Callable[[list[Any]], object]
    is_reply_to: Callable[[Json, Any], bool]


def figures(quick: bool) -> Iterator[list[Figure]]:
    rows, tokens = (2, 2048) if quick else (8, 8192)
    for name, make in MAKERS.items():
        call = make(rows, tokens)
        with serving(call.bodies) as url:
            client = HttpClient(url)
            try:
                replies = send(client, call)
                yield compare(
                    f"{name}: {rows} rows of {tokens:,} tokens, {len(call.bodies[0]) / tokens:.0f} bytes a token",
                    {
                        "json": partial(decode, call.bodies),
                        "checks": partial(call.parse, replies),
                        "client": partial(answered, client, call),
                    },
                    baseline="json",
                    repeats=3 if quick else 15,
                    rows=rows * tokens,
                    unit="token",
                    goal_seconds={"client": GOAL},
                )
            finally:
                client.close()


def decode(bodies: list[bytes]) -> list[Any]:
    return [json.loads(body) for body in bodies]


def answered(client: HttpClient, call: Call) -> object:
    return call.parse(send(client, call))


def send(client: HttpClient, call: Call) -> list[Any]:
    """Return the decoded replies to all rows of a call."""
    entries = client.post_each(
        call.path,
        call.payloads,
        names=["row"] * len(call.payloads),
        is_reply_to=call.is_reply_to,
        timeout=None,
    )
    if failed := [entry for entry in entries if not isinstance(entry, dict)]:
        raise RuntimeError(f"{len(failed)} of {len(entries)} requests failed: {failed[0]}")
    return entries


# Requests and replies -------------------------------------------------------------------------------------------------


def generate_request(rows: int, tokens: int) -> GenerateRequest:
    return GenerateRequest(
        prompts=Ragged.from_list([ids_of(row, PROMPT) for row in range(rows)]),
        sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
        logprobs="raw",
        seeds=None,
        stop_ids=frozenset(),
        request_ids=tuple(map(str, range(rows))),
        timeout=None,
    )


def score_request(rows: int, tokens: int) -> ScoreRequest:
    return ScoreRequest(
        sequences=Ragged.from_list([ids_of(row, tokens) for row in range(rows)]),
        score_from=torch.ones(rows, dtype=torch.int64),
        temperature=1.0,
        return_logits=False,
        grad=False,
        device=None,
        request_ids=tuple(map(str, range(rows))),
        timeout=None,
    )


def vllm_generation(rows: int, tokens: int) -> Call:
    info, request = vllm_info(), generate_request(rows, tokens)
    payloads = vllm.generation_requests(request, info)
    bodies = []
    for row, payload in enumerate(payloads):
        ids, values = ids_of(-1 - row, tokens), logprobs_of(row, tokens)
        choice = {"finish_reason": "length", "token_ids": ids, "logprobs": sampled(ids, values)}
        bodies.append(completion(row, payload["prompt"], choice))
    return Call(
        vllm.COMPLETIONS,
        [{**payload, "model": info.name, "request_id": name_of(row)} for row, payload in enumerate(payloads)],
        bodies,
        lambda entries: answering(VLLMServer, info, entries).generate(request),
        answering(VLLMServer, info, []).is_reply_to,
    )


def vllm_scoring(rows: int, tokens: int) -> Call:
    info, request = vllm_info(), score_request(rows, tokens)
    payloads, last = vllm.scoring_requests(request, info), [ids[-1:] for ids in request.sequences.tolist()]
    bodies = []
    for row, payload in payloads.items():
        prompt, values = payload["prompt"], logprobs_of(row, tokens)
        positions: list[Json | None] = [None]
        for token, value in zip(prompt[1:], values, strict=False):
            positions.append({str(token): {"logprob": value, "rank": 17, "decoded_token": None}})
        logprobs = sampled(last[row], [values[-1]])
        choice = {"finish_reason": "length", "token_ids": last[row], "logprobs": logprobs, "prompt_logprobs": positions}
        bodies.append(completion(row, prompt, choice))
    return Call(
        vllm.COMPLETIONS,
        [{**payload, "model": info.name, "request_id": name_of(row)} for row, payload in payloads.items()],
        bodies,
        lambda entries: answering(VLLMServer, info, entries).score_logprobs(request),
        answering(VLLMServer, info, []).is_reply_to,
    )


def sglang_generation(rows: int, tokens: int) -> Call:
    info, request = sglang_info(), generate_request(rows, tokens)
    bodies = []
    for row in range(rows):
        ids, values = ids_of(-1 - row, tokens), logprobs_of(row, tokens)
        bodies.append(generated(row, PROMPT, ids, {"output_token_logprobs": entries_of(values, ids)}))
    return Call(
        sglang.GENERATE,
        [{**payload, "rid": name_of(row)} for row, payload in enumerate(sglang.generation_requests(request, info))],
        bodies,
        lambda entries: answering(SGLangBackend, info, entries).generate(request),
        sglang.is_reply_to,
    )


def sglang_scoring(rows: int, tokens: int) -> Call:
    info, request = sglang_info(), score_request(rows, tokens)
    bodies = []
    for row, ids in enumerate(request.sequences.tolist()):
        values = [None, *logprobs_of(row, tokens)[1:]]
        meta = {"input_token_logprobs": entries_of(values, ids), "output_token_logprobs": []}
        bodies.append(generated(row, tokens, [], meta))
    return Call(
        sglang.GENERATE,
        [{**payload, "rid": name_of(row)} for row, payload in enumerate(sglang.scoring_requests(request))],
        bodies,
        lambda entries: answering(SGLangBackend, info, entries).score_logprobs(request),
        sglang.is_reply_to,
    )


MAKERS: Mapping[str, Callable[[int, int], Call]] = {
    "vLLM, generating": vllm_generation,
    "vLLM, scoring": vllm_scoring,
    "SGLang, generating": sglang_generation,
    "SGLang, scoring": sglang_scoring,
}


def vllm_info() -> VLLMInfo:
    return VLLMInfo(
        capabilities=CAPABILITIES,
        tokenizer=tokenizer(),
        model="a-model",
        name="a-model",
        routes=frozenset(),
        fields=None,
    )


def sglang_info() -> SGLangInfo:
    return SGLangInfo(CAPABILITIES, tokenizer(), "a-model", weight_label="default")


def answering(kind: Callable[..., E], info: Any, entries: list[Any]) -> E:
    """Return a backend whose server gives these entries of `HttpClient.post_each`."""
    return kind(SimpleNamespace(secrets=Secrets(), post_each=lambda *_, **options: entries), info)


def name_of(row: int) -> str:
    """Return the id of a request. The reply repeats it."""
    return f"row-{row}"


def ids_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB - 1), k=count)


def logprobs_of(seed: int, count: int) -> list[Any]:
    """Return numbers as engines have them: they compute in float32, and write it as a double, with all its digits."""
    numbers = -np.random.default_rng(seed).exponential(1.5, count)
    found: list[Any] = numbers.astype(np.float32).tolist()
    return found


def sampled(ids: list[int], values: list[float]) -> Json:
    """Return the log-probs of a completion."""
    labels = [f"token_id:{token}" for token in ids]
    offsets = np.cumsum([0, *map(len, labels[:-1])]).tolist()
    top = [{label: value} for label, value in zip(labels, values, strict=True)]
    return {"text_offset": offsets, "token_logprobs": values, "tokens": labels, "top_logprobs": top}


def completion(row: int, prompt: list[int], choice: Json) -> bytes:
    """Return a reply of vLLM with its fields in vLLM's order, written as Starlette writes JSON."""
    empty = {"logprobs": None, "finish_reason": None, "stop_reason": None, "token_ids": None, "prompt_logprobs": None}
    text = " the" * len(choice["token_ids"])
    whole = {"index": 0, "text": text, **empty, **choice, "prompt_token_ids": prompt, "routed_experts": None}
    reply = {"id": f"{vllm.ID_PREFIX}{name_of(row)}", "object": "text_completion", "created": 1, "model": "a-model"}
    return written({**reply, "choices": [whole], "usage": {"prompt_tokens": len(prompt), "total_tokens": 1}})


def generated(row: int, prompt_tokens: int, ids: list[int], meta: Json) -> bytes:
    """Return a reply of SGLang."""
    known = {
        "id": name_of(row),
        "finish_reason": {"type": "length", "length": len(ids)},
        "prompt_tokens": prompt_tokens,
    }
    label = {"weight_version": "default", "total_retractions": 0}
    return written({"text": " the" * len(ids), "output_ids": ids, "meta_info": {**known, **label, **meta}})


def entries_of(values: list[Any], ids: list[int]) -> list[list[Any]]:
    """Return log-probs as SGLang lists them."""
    return [[value, token, None] for value, token in zip(values, ids, strict=True)]


def written(reply: Json) -> bytes:
    return json.dumps(reply, separators=(",", ":")).encode()


# The server -----------------------------------------------------------------------------------------------------------


@contextmanager
def serving(bodies: list[bytes]) -> Iterator[str]:
    """Yield the URL of a server in another process, which answers the request of each row with its body."""
    context = multiprocessing.get_context("spawn")
    found, told = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(told, bodies), daemon=True)
    process.start()
    # Otherwise the end of the process would not end the wait for its port.
    told.close()
    try:
        yield f"http://127.0.0.1:{found.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(told: Any, bodies: list[bytes]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        lengths = [line.partition(":")[2] for line in lines if line.lower().startswith("content-length:")]
        request = json.loads(await reader.readexactly(int(lengths[0])))
        name = request["rid"] if "rid" in request else request["request_id"]
        body = bodies[int(name.removeprefix(name_of(0)[:-1]))]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())
