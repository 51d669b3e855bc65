"""Two real SGLang servers that answer as one: the conformance kit, faults under load, and what their canary finds.

The servers honour seeds. ``CORELM_FAULT_SECONDS=120`` makes the faults last two minutes, as ``make test-faults`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

import corelm
from corelm import Backend
from engines.sglang.restartable import KEY, RestartableServer
from engines.sglang_on_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT, SEEDS_ARGUMENTS, SEEDS_ENVIRONMENT
from helpers.fault_checks import Known, check_servers
from helpers.http_server import Request
from helpers.oracle_kit import OracleKit
from helpers.selected_kit import SelectedKit
from helpers.tampering import check_a_restart_is_found, check_only_the_sound_server_serves, half_of, tampered
from helpers.tiny_models import random_rows, tiny_model

#: Servers that are killed and restarted take minutes: `make test-faults` and `make nightly` run this.
pytestmark = pytest.mark.nightly

MODEL: nn.Module = tiny_model()
OTHER: nn.Module = tiny_model(seed=1)
PROMPTS = random_rows(*range(2, 22))
SAMPLING: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[RestartableServer]]:
    """Two servers. Tests may change their weights, but end with those of `MODEL`."""
    environment, arguments = CPU_ENVIRONMENT | SEEDS_ENVIRONMENT, CPU_ARGUMENTS | SEEDS_ARGUMENTS
    pair = [RestartableServer(folder, environment, arguments) for _ in range(2)]
    with ExitStack() as stack:
        for server in pair:
            server.start()
            stack.callback(server.kill)
        for server in pair:
            server.wait_until_ready()
        yield pair


def put_back(servers: list[RestartableServer], folder: Path) -> None:
    """Load the first weights again, under one label."""
    for server in servers:
        with corelm.get_backend("sglang", base_url=server.url, api_key=KEY) as backend:
            backend.update_weights(folder, version="default")


class TestFleetConformance(OracleKit, SelectedKit):
    model: ClassVar[nn.Module] = MODEL
    not_shown: ClassVar[dict[str, str]] = {"update_weights": "the fleets of other tests share the servers"}
    # Every draw is one request to a server that shares two cores with the tests.
    draws = 500

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, servers: list[RestartableServer]) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("sglang", base_url=[server.url for server in servers], api_key=KEY)

    def engine_sampling(self) -> dict[str, Any]:
        return {"engine_kwargs": {"logit_bias": {"7": 20.0}}}


def test_every_row_is_answered_once_and_right_whatever_happens_to_the_servers(
    servers: list[RestartableServer], folder: Path, other_folder: Path
) -> None:
    models = {"first": Known(folder, MODEL), "second": Known(other_folder, OTHER)}
    check_servers("sglang", servers, models, PROMPTS, SAMPLING, api_key=KEY)


def test_a_server_that_loads_half_a_checkpoint_is_found(
    servers: list[RestartableServer], folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    half = half_of(other_folder, folder, tmp_path / "half")

    def tamper(request: Request) -> Request:
        loads = request.path == "/update_weights_from_disk"
        return replace(request, body=request.body | {"model_path": str(half)}) if loads else request

    rows = random_rows(40, 50)
    with (
        tampered(servers[1].url, tamper) as url,
        corelm.get_backend("sglang", base_url=[servers[0].url, url], api_key=KEY, canary=True) as backend,
    ):
        check_only_the_sound_server_serves(backend, other_folder, OTHER, rows, expect=True)
    put_back(servers, folder)


def test_a_server_that_was_restarted_with_its_first_weights_under_the_name_of_new_ones_is_found(
    servers: list[RestartableServer], other_folder: Path
) -> None:
    server = servers[0]

    def restart() -> None:
        server.kill()
        server.start()
        server.wait_until_ready()

    with corelm.get_backend("sglang", base_url=server.url, api_key=KEY, canary=True) as backend:
        check_a_restart_is_found(backend, other_folder, restart, {"Authorization": f"Bearer {KEY}"}, server.url)
