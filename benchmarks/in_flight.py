"""How many rows reach an engine that batches by itself when many callers send one row each.

The engine and the server are fakes that hold every answer until the rows of all callers are in, or until none has come
for `QUIET` seconds. The ratio is that of callers to rows that are in at the same time: 1 if none waits on our side. The
seconds are those from the first call to the last answer.

    batcher     one thread per caller, through a `DynamicBatcher` with its defaults
    client      one call of `HttpClient` with its defaults, a request per row
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.measure import Figure
from corelm import Backend, Capabilities, DynamicBatcher, Ragged, hookimpl
from corelm.spec import GenerateRequest, GenerateResult
from corelm_engine_kit import EventLoopThread, HttpClient

#: Goal: every caller's row is in the engine.
GOAL = 1.0
#: Seconds without a new row after which no more are expected.
QUIET = 5.0
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


def figures(quick: bool) -> Iterator[list[Figure]]:
    for callers in (16, 64) if quick else (16, 256, 1024):
        found = {"batcher": through_the_batcher(callers), "client": through_the_client(callers)}
        work = f"{callers:,} callers of one row"
        yield [
            Figure(
                work=work, way=way, seconds=seconds, baseline="callers", ratio=ratio, spread=(ratio, ratio), goal=GOAL
            )
            for way, (seconds, reached) in found.items()
            for ratio in [callers / reached]
        ]


def through_the_batcher(callers: int) -> tuple[float, int]:
    """Return the seconds, and the largest number of rows in the engine at a time."""
    engine = FakeEngine(callers)
    with DynamicBatcher(Backend.from_plugin(engine, "fake")) as batcher, ThreadPoolExecutor(callers) as pool:
        start = time.perf_counter()
        for done in [pool.submit(batcher.generate, [[3]], {"max_new_tokens": 1}) for _ in range(callers)]:
            done.result()
        return time.perf_counter() - start, engine.most


class FakeEngine:
    """Answers with one id, once the rows of all callers are in.

    Attributes:
        most: the largest number of rows in the engine at a time.
    """

    requires_api = ">=1,<2"
    capabilities = Capabilities(
        vocab_size=8, max_context=8, generation_modes=frozenset({"raw"}), concurrent_calls=True, stops_at_timeout=True
    )

    def __init__(self, callers: int) -> None:
        self.tokenizer = NoTokenizer()
        self.most = self._inside = self._answered = 0
        self._callers, self._last = callers, 0.0
        self._changed = threading.Condition()

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        with self._changed:
            self._inside += 1
            self.most, self._last = max(self.most, self._inside), time.monotonic()
            if self._inside + self._answered == self._callers:
                self._changed.notify_all()
            while self._inside + self._answered < self._callers:
                if not self._changed.wait(QUIET) and time.monotonic() - self._last >= QUIET:
                    break
            self._inside -= 1
            self._answered += 1
        return GenerateResult(
            ids=Ragged.from_list([[3]]),
            logprobs=Ragged(torch.zeros(1), torch.ones(1).long()),
            finish_reasons=("length",),
        )


class NoTokenizer:
    """The tokenizer of an engine whose callers pass ids."""

    eos_token_id = pad_token_id = 0

    def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
        return {"input_ids": [[3] for _ in texts]}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "3" * len(ids)


def through_the_client(callers: int) -> tuple[float, int]:
    """Return the seconds, and the largest number of requests at the server at a time."""
    server = FakeServer(callers)
    with running(server) as url:
        client = HttpClient(url)
        try:
            start = time.perf_counter()
            rows: list[Any] = [{}] * callers
            names = ["row"] * callers
            answers = client.post_each("/", rows, names=names, is_reply_to=lambda *_: True, timeout=None)
            if failed := [answer for answer in answers if answer != {}]:
                raise RuntimeError(f"{len(failed)} of {callers} requests failed: {failed[0]}")
            return time.perf_counter() - start, server.most
        finally:
            client.close()


class FakeServer:
    """Answers requests with an empty object, once those of all callers are in.

    Attributes:
        most: the largest number of requests at the server at a time.
    """

    def __init__(self, callers: int) -> None:
        self.most = self._inside = self._answered = 0
        self._callers = callers
        self._last = 0.0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        self._inside += 1
        self.most, self._last = max(self.most, self._inside), time.monotonic()
        while self._inside + self._answered < self._callers and time.monotonic() - self._last < QUIET:
            await asyncio.sleep(0.05)
        self._inside -= 1
        self._answered += 1
        writer.write(REPLY)
        await writer.drain()
        writer.close()


@contextmanager
def running(server: FakeServer) -> Iterator[str]:
    """Yield the URL of the server, which runs on a thread of this process."""
    loop = EventLoopThread("fake-server")
    listener = loop.run(asyncio.start_server(server.answer, "127.0.0.1", 0, backlog=4096))
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        loop.stop()
