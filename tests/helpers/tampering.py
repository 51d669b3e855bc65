"""Servers that do not hold the weights that they say, and checks that the canary of a fleet finds them.

A small HTTP server stands between the backend and a real server, and changes what is asked when weights are loaded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import corelm_fleet
from corelm import Backend
from corelm.errors import StaleWeightsError
from helpers import oracle
from helpers.http_server import FaultServer, Reply, Request, raw

#: Takes a request. Returns the request to send instead, or the reply that the server would have given.
Tamper = Callable[[Request], Request | Reply]


@contextmanager
def tampered(url: str, tamper: Tamper) -> Iterator[str]:
    """Yield a URL that reaches the server at `url` through `tamper`."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    with httpx2.Client(base_url=url, trust_env=False, timeout=120, limits=limits) as client:

        def answer(request: Request) -> Reply:
            sent = tamper(request)
            if not isinstance(sent, Request):
                return sent
            headers = {name: value for name, value in sent.headers.items() if name.lower() == "authorization"}
            found = client.request(sent.method, sent.path, json=sent.body, headers=headers)
            content_type = found.headers.get("content-type", "application/json")
            return raw(found.content, found.status_code, {"Content-Type": content_type})

        with FaultServer(answer) as proxy:
            yield proxy.url


def half_of(new: Path, old: Path, folder: Path) -> Path:
    """Return a folder with a checkpoint of which half the tensors are new and the others are the old ones."""
    folder.mkdir()
    for file in new.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors, others = (load_file(path / "model.safetensors") for path in (new, old))
    save_file(
        tensors | {name: others[name] for name in sorted(tensors)[::2]},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def check_only_the_sound_server_serves(
    backend: Backend, folder: Path, model: nn.Module, rows: Sequence[list[int]], expect: bool
) -> None:
    """Update a fleet, one of whose two servers does not load what it is told, and assert that its canary finds it.

    Args:
        backend: the fleet. The second server is the tampered one.
        folder: the new weights.
        model: the model with the new weights.
        rows: rows to score.
        expect: whether the update has the trainer's scores.
    """
    backend.update_weights(folder, "tampered", expect=corelm_fleet.probe_scores(model) if expect else None)
    sound, faulty = backend.engine.plugin.status()
    assert sound.state == "healthy" and faulty.state != "healthy"
    print(f"\n{faulty.why}")
    for _ in range(3):
        scores = backend.score_logprobs(rows)
        assert scores.weight_versions == ("tampered",) * len(rows)
        for row, found in zip(rows, scores.logprobs.split(), strict=True):
            torch.testing.assert_close(found, oracle.logprobs(model, row), rtol=0, atol=1e-4)


def check_a_restart_is_found(
    backend: Backend, folder: Path, restart: Callable[[], object], headers: Mapping[str, str], url: str
) -> None:
    """Load new weights, restart the server with its first ones under the label of the new ones; the canary finds it.

    Args:
        backend: a backend with a canary on one server.
        folder: the new weights.
        restart: kills the server and starts it again.
        headers: what the server asks for.
        url: the server.
    """
    backend.update_weights(folder, "tuned")
    canary = corelm_fleet.canary_of(backend)
    canary.look()
    restart()
    body = {"new_version": "tuned", "abort_all_requests": False}
    httpx2.post(f"{url}/update_weight_version", json=body, headers=dict(headers), trust_env=False).raise_for_status()
    with pytest.raises(StaleWeightsError):
        canary.look()
