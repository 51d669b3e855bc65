"""A fake SGLang server, whose model is one table and which can be told to misbehave; and a fake ``launch_server``."""

from __future__ import annotations

import math
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
from helpers.http_server import FaultServer, Reply, Request, event_stream, json_reply, raw
from helpers.tiny_models import VOCAB, tiny_model, tiny_tokenizer

MAX_CONTEXT = 64


def _table() -> Tensor:
    return 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


class FakeSGLang:
    """Answers the requests of a `FaultServer` as SGLang does. The next token depends only on the last one.

    Attributes:
        logits: float32[V, V]; row t holds the logits of the token that follows token t.
        weight_label: the server's name for its weights.
        scaled: whether log-probs are taken after dividing the logits by the temperature, as a default server does.
        honours_seeds: whether equal seeds give equal answers.
        knows_masks: whether it returns the ids that truncation has left, if asked.
        spoil: changes a reply to ``/generate`` before it is sent.
        fault: returns a reply to send instead, or None.
        model_info: the page ``/model_info``, without the weight label.
        server_info: the page ``/server_info``.
        pause: called with the number of each token before it is streamed.
        repeats_last_event: whether a stream has its last event twice.
        requests: the bodies of all requests to ``/generate``.
        weight_updates: the bodies of all requests to load weights.
        pauses: path and body of all requests to pause and to go on.
    """

    def __init__(self, folder: Path) -> None:
        self.logits = _table()
        self.weight_label = "default"
        self.scaled, self.honours_seeds, self.knows_masks = True, False, True
        self.spoil: Callable[[dict[str, Any]], Any] = lambda reply: None
        self.fault: Callable[[Request], Reply | None] = lambda request: None
        self.pause: Callable[[int], object] = lambda step: None
        self.repeats_last_event = False
        self.model_info: dict[str, Any] = {
            "tokenizer_path": str(folder),
            "model_path": str(folder),
            "is_generation": True,
        }
        self.server_info: dict[str, Any] = {
            "model_path": str(folder),
            "max_req_input_len": MAX_CONTEXT + 1,
            "sampling_mask_max_tokens": VOCAB,
        }
        self.requests: list[dict[str, Any]] = []
        self.weight_updates: list[dict[str, Any]] = []
        self.pauses: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, request: Request) -> Reply:
        fault = self.fault(request)
        if fault is not None:
            return fault
        if request.path == "/model_info":
            return json_reply({**self.model_info, "weight_version": self.weight_label})
        if request.path == "/server_info":
            return json_reply(self.server_info)
        if request.path == "/update_weights_from_disk":
            return self._update(request.body)
        if request.path in ("/pause_generation", "/continue_generation"):
            self.pauses.append((request.path, request.body))
            return json_reply({"status": "ok"})
        if request.path == "/update_weight_version":
            self.weight_label = request.body["new_version"]
            return json_reply({"success": True})
        if request.path == "/abort_request":
            return json_reply(None)
        if request.path == "/health_generate":
            return raw(b"")
        assert request.path == "/generate"
        self.requests.append(request.body)
        reply = self.reply_to(request.body)
        self.spoil(reply)
        return event_stream(self.growing(reply)) if request.body.get("stream") else json_reply(reply)

    def growing(self, reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a reply as the server streams it: each event has the whole answer so far."""
        meta, count = reply["meta_info"], len(reply["output_ids"])
        for known in range(1, count):
            self.pause(known - 1)
            parts = {name: found[:known] for name, found in meta.items() if name.startswith("output_to")}
            told = {**meta, "finish_reason": None, **parts}
            yield {**reply, "output_ids": reply["output_ids"][:known], "meta_info": told}
        self.pause(count - 1)
        yield reply
        if self.repeats_last_event:
            yield reply

    def logprobs(self, token: int, temperature: float = 1.0) -> Tensor:
        """Return the log-probs of the token that follows `token`, float32[V]."""
        return (self.logits[token] / temperature).log_softmax(-1)

    def _update(self, body: dict[str, Any]) -> Reply:
        self.weight_updates.append(body)
        self.weight_label = body["weight_version"]
        return json_reply({"success": True, "message": "loaded"})

    def reply_to(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, sampling = body["input_ids"], body["sampling_params"]
        meta: dict[str, Any] = {"id": body["rid"], "weight_version": self.weight_label}
        meta["weight_versions"] = [{"version": self.weight_label, "start": 0, "end": 1}]
        start = body.get("logprob_start_len", len(prompt))
        pairs = [(float(self.logprobs(a)[b]), b) for a, b in zip(prompt[start:], prompt[start + 1 :], strict=False)]
        meta["input_token_logprobs"] = [[None, self._echo(t), None] for t in prompt[start : start + 1]]
        meta["input_token_logprobs"] += [[value, self._echo(token), None] for value, token in pairs]
        ids, values, finish = self._answer(prompt[-1], sampling)
        k, temperature = body.get("top_logprobs_num"), (sampling["temperature"] or 1.0) if self.scaled else 1.0
        if k:
            meta["input_top_logprobs"] = [None, *(self._best(token, 1.0, k) for token in prompt[start:-1])]
            meta["output_top_logprobs"] = [self._best(token, temperature, k) for token in [prompt[-1], *ids][:-1]]
        if body.get("return_sampling_mask") and self.knows_masks:
            kept = [self.kept(token, sampling) for token in [prompt[-1], *ids][:-1]]
            every = body.get("sampling_logprobs_mode") == "support"
            meta["output_token_sampling_mask"] = [[*each] for each in kept]
            meta["output_token_sampling_logprobs"] = [
                [*each.values()] if every else each[token] for each, token in zip(kept, ids, strict=True)
            ]
        meta |= {"output_token_logprobs": [[v, t, None] for v, t in zip(values, ids, strict=True)]}
        return {"text": "", "output_ids": ids, "meta_info": meta | {"finish_reason": finish}}

    def _answer(self, last: int, sampling: dict[str, Any]) -> tuple[list[int], list[float], dict[str, Any]]:
        temperature = sampling["temperature"] or 1.0
        generator = random.Random(sampling.get("sampling_seed") if self.honours_seeds else None)
        ids: list[int] = []
        values: list[float] = []
        while len(ids) < sampling["max_new_tokens"]:
            kept = self.kept(last, sampling)
            token = generator.choices([*kept], [math.exp(value) for value in kept.values()])[0]
            if not sampling["temperature"]:
                token = int(self.logits[last].argmax())
            values.append(float(self.logprobs(last, temperature if self.scaled else 1.0)[token]))
            ids.append(token)
            last = token
            if not sampling["ignore_eos"] and (token == 2 or token in sampling["stop_token_ids"]):
                return ids, values, {"type": "stop", "matched": token}
            # Like the real server, look for stop strings only in the last few tokens.
            tail = tiny_tokenizer().decode(ids[-2:])
            for stop in sampling.get("stop", ()):
                if stop in tail:
                    return ids, values, {"type": "stop", "matched": stop}
        return ids, values, {"type": "length", "length": len(ids)}

    def kept(self, last: int, sampling: dict[str, Any]) -> dict[int, float]:
        """Return the log-probs of the ids that truncation leaves after `last`, the most probable first."""
        probs, ids = self.logprobs(last, sampling["temperature"] or 1.0).exp().sort(descending=True)
        top_k = VOCAB if sampling["top_k"] == -1 else sampling["top_k"]
        keep = (torch.arange(VOCAB) < top_k) & (probs.cumsum(0) - probs <= sampling["top_p"])
        keep &= probs >= probs[0] * sampling["min_p"]
        values = (probs[keep] / probs[keep].sum()).log()
        return dict(zip(ids[keep].tolist(), values.tolist(), strict=True))

    def _best(self, last: int, temperature: float, k: int) -> list[list[Any]]:
        values, ids = self.logprobs(last, temperature).topk(k)
        return [[value, token, None] for value, token in zip(values.tolist(), ids.tolist(), strict=True)]

    @staticmethod
    def _echo(token: int) -> int:
        return 0 if token == VOCAB - 1 else token


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's checkpoint and tokenizer."""
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
    """``connect(**options)`` opens a backend on the fake server, which is closed after the test."""
    with ExitStack() as stack:

        def opened(**options: Any) -> Backend:
            return stack.enter_context(corelm.get_backend("sglang", **{"base_url": server.url, **options}))

        yield opened


@pytest.fixture
def backend(connect: Callable[..., Backend], fake: FakeSGLang) -> Backend:
    opened = connect()
    fake.requests.clear()
    return opened


@pytest.fixture
def fake_launch_env(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``python -m sglang.launch_server`` runs a fake server that needs no SGLang."""
    package = tmp_path / "fake" / "sglang"
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
# Like the real server, turn the configuration into command-line words.
key = json.load(open(sys.argv[sys.argv.index("--config") + 1]))["api-key"]
print("the GPUs are", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
options = parser.parse_args(["--api-key", key, *sys.argv[1:]])
print("the key is", key, flush=True)
open(os.environ["PID_FILE"], "w").write(str(os.getpid()))
for _ in range(int(options.children or 0)):
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
if options.after == "never":
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


http.server.HTTPServer((options.host, int(options.port)), Handler).serve_forever()
"""


@pytest.fixture
def other_folder(tmp_path: Path) -> Path:
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    return tmp_path / "other"
