"""Servers for tests, the official clients for them, and a wrapper that sees what the engine sees."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import torch
from torch import nn

from corelm import Backend, hookimpl
from corelm.spec import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm.spec.message import Chat
from corelm_serve import ServerOptions, ServerThread, SessionStore
from helpers.processes import heed_interrupts
from helpers.tiny_models import tiny_model, tiny_tokenizer

CHAT = [{"role": "user", "content": "Where is the cat?"}]
#: Seconds that a request of a test may take on a busy machine.
TIMEOUT = 60.0


@contextmanager
def serving(backend: Backend, store: SessionStore | None = None, **options: Any) -> Iterator[ServerThread]:
    """Serve a backend, and assert that nothing of the server is left afterwards."""
    before = set(threading.enumerate())
    with ServerThread(backend, ServerOptions(**options), sessions=store) as server:
        yield server
    left = [each for each in set(threading.enumerate()) - before if each.is_alive()]
    assert not left, left


def client_of(server: ServerThread, **options: Any) -> openai.OpenAI:
    """Return the official client."""
    given = {"max_retries": 0, "timeout": TIMEOUT, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, **given)


def http_of(server: ServerThread) -> httpx2.Client:
    """Return a plain client, which sends what the official one would not."""
    headers = {"authorization": f"Bearer {server.api_key}"}
    return httpx2.Client(base_url=server.url, headers=headers, timeout=TIMEOUT, trust_env=False)


def raw_request(server: ServerThread, path: str, body: Mapping[str, Any]) -> socket.socket:
    """Send a request and return the socket: its owner reads what comes, and hangs up."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=TIMEOUT)
    made.sendall(head.encode() + data)
    return made


@dataclass
class Seen:
    """A hook wrapper that remembers what the engine was asked and what it answered.

    Attributes:
        answers: the ids of each prompt and of its answer, in the order in which they were complete.
        scored: the sequences that were scored.
    """

    answers: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    scored: list[tuple[int, ...]] = field(default_factory=list)

    @hookimpl(wrapper=True)
    def generate(self, request: GenerateRequest) -> Iterator[Any]:
        result: GenerateResult = yield
        prompts = request.prompts.tolist()
        self.answers += [(tuple(p), tuple(a)) for p, a in zip(prompts, result.ids.tolist(), strict=True)]
        return result

    @hookimpl(wrapper=True)
    def score_logprobs(self, request: ScoreRequest) -> Iterator[Any]:
        result: ScoreResult = yield
        self.scored += [tuple(row) for row in request.sequences.tolist()]
        return result


def memorized(prompt: list[int], answer: list[int]) -> nn.Module:
    """Return a tiny model that was trained until it answers a prompt with these ids."""
    model = tiny_model(initializer_range=0.05)
    ids = torch.tensor([[*prompt, *answer]])
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(200):
            loss = model(input_ids=ids, labels=labels).loss
            if loss.item() < 0.01:
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def chat_ids(messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
    """Return the prompt of a conversation, as transformers itself renders it for the tiny tokenizer."""
    found = tiny_tokenizer().apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tiny_tokenizer()(found, add_special_tokens=False)["input_ids"]
    return ids


def told(
    store: SessionStore, messages: Sequence[Any], answer: Mapping[str, Any], ids: Sequence[int] = (7, 8), **options: Any
) -> tuple[str, Chat]:
    """Answer a request of a store, and return its session and the messages that it was to render."""
    with store.begin(messages, **options) as turn:
        turn.record(prompt_ids=[1, 2, 3], ids=ids, message=answer)
    return turn.session_id, turn.messages


class Served:
    """A server in a process.

    Attributes:
        process: the process.
        url: where it is.
        key: the key that it printed; None if it printed none.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, key: str | None) -> None:
        self.process, self.url, self.key = process, url, key

    def end(self, how: signal.Signals) -> tuple[int, str]:
        """Send a signal; return the exit status and what was printed since."""
        self.process.send_signal(how)
        _, said = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, said


@contextmanager
def served(*more: str, env: Mapping[str, str] | None = None, key: bool = True) -> Iterator[Served]:
    process = subprocess.Popen(
        [sys.executable, "-m", "corelm_cli", "serve", "--port", "0", *more],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(env or {})},
        preexec_fn=heed_interrupts,
    )
    try:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"at (http://\S+)/v1\n" + (r"key: (\S+)\n" if key else ""), said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        yield Served(process, found[1], found[2] if key else None)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stderr.close()
