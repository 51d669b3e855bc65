"""A server that speaks as SGLang's does, over a model that is one table, and which can be made to misbehave."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import corelm
from corelm import Backend
from helpers.http_server import FaultServer, Reply, Request, json_reply
from helpers.tiny_models import VOCAB, tiny_model, tiny_tokenizer

LIMIT = 64


def _table() -> Tensor:
    return 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


class FakeSGLang:
    """Call it with a request: an answer for `FaultServer`. What follows a token depends on that token alone.

    Attributes:
        logits: float32[V, V], of what follows each token. label: what it calls its weights.
        scaled: divides the logits of a log-prob by the temperature. seeds: honours them.
        spoil: changes an answer before it is sent. fault: a reply to give to a request instead, or None.
        about, settings: what its two pages say. asked: the bodies of all requests to generate.
    """

    def __init__(self, folder: Path) -> None:
        self.logits = _table()
        self.label = "default"
        self.scaled, self.seeds = True, False
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: None
        self.fault: Callable[[Request], Reply | None] = lambda request: None
        self.about: dict[str, Any] = {"tokenizer_path": str(folder), "model_path": str(folder), "is_generation": True}
        self.settings: dict[str, Any] = {"model_path": str(folder), "max_req_input_len": LIMIT + 1}
        self.asked: list[dict[str, Any]] = []
        self.loaded: list[dict[str, Any]] = []

    def __call__(self, request: Request) -> Reply:
        fault = self.fault(request)
        if fault is not None:
            return fault
        if request.path == "/model_info":
            return json_reply({**self.about, "weight_version": self.label})
        if request.path == "/server_info":
            return json_reply(self.settings)
        if request.path == "/update_weights_from_disk":
            return self._update(request.body)
        if request.path == "/abort_request":
            return json_reply(None)
        assert request.path == "/generate"
        self.asked.append(request.body)
        answer = self._generate(request.body)
        self.spoil(answer)
        return json_reply(answer)

    def logprobs(self, token: int, temperature: float = 1.0) -> Tensor:
        """float32[V]: of what follows `token`."""
        return (self.logits[token] / temperature).log_softmax(-1)

    def _update(self, body: dict[str, Any]) -> Reply:
        self.loaded.append(body)
        self.label = body["weight_version"]
        return json_reply({"success": True, "message": "loaded"})

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        given, wanted = body["input_ids"], body["sampling_params"]
        meta: dict[str, Any] = {"weight_version": self.label}
        meta["weight_versions"] = [{"version": self.label, "start": 0, "end": 1}]
        start = body.get("logprob_start_len", len(given))
        pairs = [(float(self.logprobs(a)[b]), b) for a, b in zip(given[start:], given[start + 1 :], strict=False)]
        meta["input_token_logprobs"] = [[None, self._echo(t), None] for t in given[start : start + 1]]
        meta["input_token_logprobs"] += [[value, self._echo(token), None] for value, token in pairs]
        ids, values, finish = self._answer(given[-1], wanted)
        meta |= {"output_token_logprobs": [[v, t, None] for v, t in zip(values, ids, strict=True)]}
        return {"text": "", "output_ids": ids, "meta_info": meta | {"finish_reason": finish}}

    def _answer(self, last: int, wanted: dict[str, Any]) -> tuple[list[int], list[float], dict[str, Any]]:
        heat = wanted["temperature"] or 1.0
        stream = random.Random(wanted.get("sampling_seed") if self.seeds else None)
        ids: list[int] = []
        values: list[float] = []
        while len(ids) < wanted["max_new_tokens"]:
            weights = self.logprobs(last, heat).exp().tolist()
            best = max(range(VOCAB), key=weights.__getitem__)
            token = stream.choices(range(VOCAB), weights)[0] if wanted["temperature"] else best
            values.append(float(self.logprobs(last, heat if self.scaled else 1.0)[token]))
            ids.append(token)
            last = token
            if not wanted["ignore_eos"] and (token == 2 or token in wanted["stop_token_ids"]):
                return ids, values, {"type": "stop", "matched": token}
            # As the real one: no token before the last few is looked at again.
            tail = tiny_tokenizer().decode(ids[-2:])
            for stop in wanted.get("stop", ()):
                if stop in tail:
                    return ids, values, {"type": "stop", "matched": stop}
        return ids, values, {"type": "length", "length": len(ids)}

    @staticmethod
    def _echo(token: int) -> int:
        return 0 if token == VOCAB - 1 else token


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, with a checkpoint and a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def fake(folder: Path) -> FakeSGLang:
    return FakeSGLang(folder)


@pytest.fixture
def server(fake: FakeSGLang) -> Iterator[FaultServer]:
    with FaultServer(fake) as running:
        yield running


@pytest.fixture
def connect(server: FaultServer) -> Iterator[Callable[..., Backend]]:
    """``connect(**options)``: the backend on the fake server; closed afterwards."""
    with ExitStack() as stack:

        def opened(**options: Any) -> Backend:
            return stack.enter_context(corelm.get_backend("sglang", **{"base_url": server.url, **options}))

        yield opened


@pytest.fixture
def backend(connect: Callable[..., Backend], fake: FakeSGLang) -> Backend:
    opened = connect()
    fake.asked.clear()
    return opened


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """The environment in which ``python -m sglang.launch_server`` is a few lines of the standard library."""
    package = tmp_path / "stand-in" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(_LAUNCH_SERVER)
    return {"PYTHONPATH": str(package.parent), "PID_FILE": str(tmp_path / "pid")}


_LAUNCH_SERVER = """
import argparse, http.server, json, os, subprocess, sys
parser = argparse.ArgumentParser()
for name in ("--config", "--api-key", "--model-path", "--host", "--port", "--number", "--children", "--after"):
    parser.add_argument(name)
parser.add_argument("--flag", action="store_true")
# The real one, too, turns its configuration into words of the command line.
key = json.load(open(sys.argv[sys.argv.index("--config") + 1]))["api-key"]
given = parser.parse_args(["--api-key", key, *sys.argv[1:]])
print("the key is", key, flush=True)
open(os.environ["PID_FILE"], "w").write(str(os.getpid()))
for _ in range(int(given.children or 0)):
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
if given.after == "never":
    import signal; signal.pause()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        allowed = self.headers["Authorization"] == f"Bearer {key}"
        body = json.dumps({"argv": sys.argv[1:], "pid": os.getpid()}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


http.server.HTTPServer((given.host, int(given.port)), Handler).serve_forever()
"""
