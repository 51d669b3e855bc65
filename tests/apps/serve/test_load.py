"""64 clients at a time, of which a third hang up: what was recorded is what the engine saw, and nothing is left.

``make test-faults`` runs this for a minute; elsewhere the clients send a few hundred requests.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest

import corelm
from corelm import Backend
from corelm_serve import ServerThread, SessionStore
from helpers.fleet_faults import seconds
from helpers.processes import wait_until
from helpers.serving import TIMEOUT, Seen, serving
from helpers.tiny_models import tiny_model, tiny_tokenizer

CLIENTS = 64
#: 0: no limit, but for that of `REQUESTS`.
SECONDS = seconds(0.0)
#: The most that a run sends.
REQUESTS = 60_000 if SECONDS else 160
WORDS = ("the cat", "the sea", "a small bird", "the tea", "it is dark", "Où est le chat ?")


class Crowd:
    """Clients that chat, each for itself, until the time is over or enough was asked.

    Attributes:
        told: for each session, the texts of the answers that a client was told completely.
        left: number of answers that a client did not wait for.
    """

    def __init__(self, server: ServerThread, seconds: float) -> None:
        self._server, self._end = server, time.monotonic() + (seconds or math.inf)
        self.told: dict[str, list[str]] = {}
        self.left = self._sent = 0

    async def run(self) -> None:
        headers = {"authorization": f"Bearer {self._server.api_key}"}
        limits = httpx2.Limits(max_connections=CLIENTS)
        async with httpx2.AsyncClient(
            base_url=self._server.url, headers=headers, timeout=TIMEOUT, limits=limits, trust_env=False
        ) as client:
            await asyncio.gather(*(self._chat(client, number) for number in range(CLIENTS)))

    async def _chat(self, client: httpx2.AsyncClient, number: int) -> None:
        draw, turn, name = random.Random(number), 0, ""
        chat: list[dict[str, Any]] = []
        while time.monotonic() < self._end and self._sent < REQUESTS:
            self._sent += 1
            if len(chat) in (0, 6):
                name, chat = f"client-{number}-{turn}", []
            turn += 1
            chat.append({"role": "user", "content": f"{number}.{turn}: {draw.choice(WORDS)}"})
            leaves, streams = number % 3 == 0 and draw.random() < 0.5, draw.random() < 0.7
            asked = {"messages": chat, "max_tokens": 24, "temperature": 0.9, "stream": streams}
            said = await self._ask(client, asked, name, draw.randrange(4) if leaves else None)
            if said is None:
                self.left += 1
                chat.pop()
            else:
                self.told.setdefault(name, []).append(said)
                chat.append({"role": "assistant", "content": said})

    async def _ask(
        self, client: httpx2.AsyncClient, asked: dict[str, Any], name: str, leave_after: int | None
    ) -> str | None:
        """Return the answer, or None if the client has hung up."""
        headers = {"x-session-id": name}
        async with client.stream("POST", "/v1/chat/completions", json=asked, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            if not asked["stream"]:
                if leave_after is not None:
                    return None
                return (await answer.aread()) and answer.json()["choices"][0]["message"]["content"]
            text, events = "", 0
            async for line in answer.aiter_lines():
                if events == leave_after:
                    return None
                events += line.startswith("data: ")
                assert '"error"' not in line, line
                if line.startswith("data: {"):
                    text += httpx2.Response(200, content=line[6:]).json()["choices"][0]["delta"].get("content") or ""
            return text


def recorded(server: ServerThread) -> tuple[Counter[Any], dict[str, list[str]]]:
    """Return prompt and answer of every recorded answer, as ids, and the texts of each session."""
    found: Counter[Any] = Counter()
    texts: dict[str, list[str]] = {}
    assert server.sessions is not None and server.sessions.dropped == 0
    for name in server.sessions.ids():
        session = server.sessions.get(name)
        for node in session.nodes:
            if node.kind != "answer":
                continue
            row = session.row(node)
            begin = row.sampled_by.index(node.id)
            assert row.sampled_by[begin:] == [node.id] * (len(row.sampled_by) - begin)
            assert None not in row.log_probs[begin:]
            found[tuple(row.token_ids[:begin]), tuple(row.token_ids[begin:])] += 1
            assert node.message is not None and node.provenance is not None
            texts.setdefault(name, []).append(node.message.content or "")
    return found, texts


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("name", ["toy", "transformers"])
def test_what_was_recorded_is_what_the_engine_saw_and_nothing_is_left(name: str) -> None:
    seen = Seen()
    model = {"model": tiny_model(), "tokenizer": tiny_tokenizer()} if name == "transformers" else {}
    with corelm.get_backend(name, wrappers=[seen], **model) as backend:
        files = open_files()
        check(backend, seen)
        assert wait_until(lambda: open_files() <= files), "sockets are left"


def check(backend: Backend, seen: Seen) -> None:
    store = SessionStore(limit_sessions=REQUESTS, limit_tokens=200_000_000)
    with serving(backend, store, model_name="m") as server:
        crowd = Crowd(server, SECONDS)
        asyncio.run(crowd.run())
        assert wait_until(lambda: server.service.admitted_now == 0), "requests are left"
        state = server.service.backend.state()
        assert state.queued == state.in_flight == 0
        found, texts = recorded(server)
    answered = sum(map(len, crowd.told.values()))
    assert crowd.left > 10 and answered > CLIENTS
    engine = Counter(pair for pair in seen.answers if pair[1])
    assert not found - engine, "something was recorded that the engine did not say"
    unrecorded = engine - found
    # Nobody was told these: their clients had left before the first token, in an engine that cannot abort.
    assert unrecorded.total() <= (0 if backend.capabilities.abort else crowd.left)
    for session, said in crowd.told.items():
        rest = iter(texts[session])
        assert all(each in rest for each in said), f"{session}: {said} is not in {texts[session]}"
    reasons = Counter(
        node.finish_reason for each in store.ids() for node in store.get(each).nodes if node.kind == "answer"
    )
    assert reasons["error"] == 0 and (reasons["abort"] > 0) == backend.capabilities.abort
    print(f"{backend.name}: {answered} answers, {crowd.left} hung up, {dict(reasons)}")
