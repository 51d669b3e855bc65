"""Two real vLLM servers that answer as one: the conformance kit, faults under load, and what their canary finds.

``CORELM_FAULT_SECONDS=120`` makes the faults last two minutes, as ``make test-faults`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

import corelm
from corelm import Backend
from engines.vllm.launch import VLLMServerProcess
from helpers.fault_checks import Known, check_servers
from helpers.http_server import Reply, Request, json_reply
from helpers.oracle_kit import OracleKit
from helpers.selected_kit import SelectedKit
from helpers.tampering import check_a_restart_is_found, check_only_the_sound_server_serves, half_of, tampered
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer

#: Two servers that are killed and restarted take minutes: `make test-faults` and `make nightly` run this.
pytestmark = pytest.mark.nightly

MODEL: nn.Module = tiny_model(hidden_size=128)
OTHER: Any = tiny_model(hidden_size=128, seed=1)
PROMPTS = random_rows(*range(2, 22))
KEY = "the key of both servers"
SAMPLING: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def servers(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VLLMServerProcess]]:
    """Two servers. Tests may change their weights, but end with those of `MODEL`, under the label "default"."""
    logs = tmp_path_factory.mktemp("log")
    pair = [VLLMServerProcess(tiny_folder, logs / f"{at}.txt", "--enable-prefix-caching", key=KEY) for at in range(2)]
    try:
        for server in pair:
            server.start()
        for server in pair:
            server.wait_until_ready()
        yield pair
    finally:
        for server in pair:
            server.kill()


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    OTHER.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def connect(servers: list[VLLMServerProcess], **options: Any) -> Backend:
    return corelm.get_backend("vllm", base_url=[server.url for server in servers], api_key=KEY, **options)


class TestFleetConformance(OracleKit, SelectedKit):
    model: ClassVar[nn.Module] = MODEL
    # Every draw is one request to a server that shares two cores with the tests.
    draws = 500
    not_shown: ClassVar[dict[str, str]] = {"update_weights": "the fleets of other tests share the servers"}

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, servers: list[VLLMServerProcess]) -> Callable[[], Backend]:
        return lambda: connect(servers)

    def engine_sampling(self) -> dict[str, Any]:
        return {"engine_kwargs": {"logit_bias": {"7": 20.0}}}


def test_every_row_is_answered_once_and_right_whatever_happens_to_the_servers(
    servers: list[VLLMServerProcess], tiny_folder: Path, other_folder: Path
) -> None:
    models = {"first": Known(tiny_folder, MODEL), "second": Known(other_folder, OTHER)}
    check_servers("vllm", servers, models, PROMPTS, SAMPLING, api_key=KEY)


# The canary -----------------------------------------------------------------------------------------------------------


def without_reset(request: Request) -> Request | Reply:
    if request.path.startswith("/pause"):
        return replace(request, path=f"{request.path}&clear_cache=false")
    return json_reply({"success": True}) if request.path == "/reset_prefix_cache" else request


@pytest.mark.parametrize("fault", ["a kept prefix cache", "half a checkpoint"])
def test_a_server_that_does_not_serve_the_new_weights_is_found(
    servers: list[VLLMServerProcess], tiny_folder: Path, other_folder: Path, tmp_path: Path, fault: str
) -> None:
    half = half_of(other_folder, tiny_folder, tmp_path / "half")

    def with_half(request: Request) -> Request:
        if request.path != "/collective_rpc":
            return request
        return replace(request, body=request.body | {"kwargs": {"weights_path": str(half)}})

    kept = fault == "a kept prefix cache"
    rows = random_rows(40, 50)
    with (
        tampered(servers[1].url, without_reset if kept else with_half) as url,
        corelm.get_backend("vllm", base_url=[servers[0].url, url], api_key=KEY, canary=True) as backend,
    ):
        check_only_the_sound_server_serves(backend, other_folder, OTHER, rows, expect=not kept)
    put_back(servers, tiny_folder)


def test_a_server_that_was_restarted_with_its_first_weights_under_the_name_of_new_ones_is_found(
    servers: list[VLLMServerProcess], other_folder: Path
) -> None:
    server = servers[0]

    def restart() -> None:
        server.kill()
        server.start()
        server.wait_until_ready()

    with corelm.get_backend("vllm", base_url=server.url, api_key=KEY, canary=True) as backend:
        check_a_restart_is_found(backend, other_folder, restart, {"Authorization": f"Bearer {KEY}"}, server.url)


def put_back(servers: list[VLLMServerProcess], folder: Path) -> None:
    for server in servers:
        with corelm.get_backend("vllm", base_url=server.url, api_key=KEY) as backend:
            backend.update_weights(folder, version="default")
