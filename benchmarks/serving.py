"""How much processor time an answer costs when it is served over HTTP, in microseconds a token.

The toy answers the same prompts, directly and through a server. The clients are another process, whose time does not
count, so what a way costs more than `direct` is the server's.

    direct             ``Backend.generate``
    direct, streamed   ``Backend.stream``
    server             ``/v1/completions``, which records the answers
    server, streamed   the same as server-sent events, one for each token
    not recorded       the same as `server`, streamed, of a server that records nothing
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import corelm
from benchmarks.measure import LONGER, Figure, compare
from corelm import Backend
from corelm_serve import ServerOptions, ServerThread

TOKENS, PROMPT = 128, "Where is the cat?"


def figures(quick: bool) -> Iterator[list[Figure]]:
    clients = 4 if quick else 16
    with ExitStack() as stack:
        backend = stack.enter_context(corelm.get_backend("toy"))
        ask = stack.enter_context(_clients(clients))
        servers = [
            stack.enter_context(ServerThread(backend, ServerOptions(model_name="m", sessions=each)))
            for each in (True, False)
        ]
        yield compare(
            f"serving {clients} clients with {TOKENS} tokens each",
            {
                "direct": partial(_generate, backend, clients),
                "direct, streamed": partial(_stream, backend, clients),
                "server": partial(ask, servers[0], stream=False),
                "server, streamed": partial(ask, servers[0], stream=True),
                "not recorded": partial(ask, servers[1], stream=True),
            },
            baseline="direct",
            repeats=3 if quick else 15,
            rows=clients * TOKENS,
            unit="token",
            longest=LONGER,
        )


def _generate(backend: Backend, clients: int) -> None:
    prompts = backend.tokenize([PROMPT] * clients).ids
    backend.generate(prompts, {"max_new_tokens": TOKENS, "ignore_eos": True})


def _stream(backend: Backend, clients: int) -> None:
    prompts = backend.tokenize([PROMPT] * clients).ids
    with backend.stream(prompts, {"max_new_tokens": TOKENS, "ignore_eos": True}) as stream:
        for _ in stream:
            pass


@contextmanager
def _clients(count: int) -> Iterator[Callable[..., None]]:
    """Yield a function that lets clients in another process ask a server once, all at the same time."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_be_clients, args=(there, count), daemon=True)
    process.start()
    there.close()

    def ask(server: ServerThread, *, stream: bool) -> None:
        here.send((server.url, server.api_key, stream))
        tokens = here.recv()
        if tokens != count * TOKENS:
            raise RuntimeError(f"the clients were told {tokens} tokens and not {count * TOKENS}")

    try:
        yield ask
    finally:
        here.close()
        process.join()


def _be_clients(orders: Connection, count: int) -> None:
    while True:
        try:
            url, key, stream = orders.recv()
        except EOFError:
            return
        orders.send(asyncio.run(_ask(url, key, stream, count)))


async def _ask(url: str, key: str, stream: bool, count: int) -> int:
    """Return how many tokens all clients were told together."""
    import httpx2

    headers = {"authorization": f"Bearer {key}"}
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}

    async def one() -> int:
        answer = await client.post("/v1/completions", json=asked)
        answer.raise_for_status()
        if not stream:
            return int(answer.json()["usage"]["completion_tokens"])
        *_, last, _ = (line for line in answer.text.splitlines() if line.startswith("data: "))
        return int(httpx2.Response(200, content=last[6:]).json()["usage"]["completion_tokens"])

    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=600.0, trust_env=False) as client:
        return sum(await asyncio.gather(*(one() for _ in range(count))))
