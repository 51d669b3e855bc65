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
import torch
from torch import Tensor, nn

import corelm
from corelm import Backend
from engines.sglang.restartable import KEY, RestartableServer
from engines.sglang_on_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT, SEEDS_ARGUMENTS, SEEDS_ENVIRONMENT
from helpers import oracle
from helpers.fleet_faults import FaultTest, answers_of, seconds
from helpers.fleet_kit import FleetKit
from helpers.fleet_processes import Servers, fleet_of_servers
from helpers.http_server import Request
from helpers.processes import wait_until
from helpers.tampering import check_a_restart_is_found, check_only_the_sound_server_serves, half_of, tampered
from helpers.tiny_models import random_rows, tiny_model

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


class TestFleetConformance(FleetKit):
    not_shown: ClassVar[dict[str, str]] = {"update_weights": "the fleets of other tests share the servers"}
    # Every draw is one request to a server that shares two cores with the tests.
    draws = 500

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, servers: list[RestartableServer]) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("sglang", base_url=[server.url for server in servers], api_key=KEY)

    def oracle(self, ids: list[int], temperature: float) -> Tensor:
        return oracle.logprobs(MODEL, ids, temperature)

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        return (oracle.next_logits(MODEL, ids)[-1] / temperature).log_softmax(-1)

    def engine_sampling(self) -> dict[str, Any]:
        return {"engine_kwargs": {"logit_bias": {"7": 20.0}}}


def test_every_row_is_answered_once_and_right_whatever_happens_to_the_servers(
    servers: list[RestartableServer], folder: Path, other_folder: Path
) -> None:
    weights = {"first": folder, "second": other_folder}
    expected = {}
    with corelm.get_backend("sglang", base_url=servers[0].url, api_key=KEY) as one:
        for name, model in (("second", OTHER), ("first", MODEL)):
            one.update_weights(weights[name], version="default" if name == "first" else name)
            expected[name] = answers_of(one, PROMPTS, SAMPLING)
            for (number, _), answer in expected[name].items():
                plain = oracle.answer_logprobs(model, PROMPTS[number], answer.ids)
                torch.testing.assert_close(torch.tensor(answer.logprobs), plain, rtol=0, atol=1e-4)
    expected = {name: expected[name] for name in weights}
    with fleet_of_servers("sglang", servers, api_key=KEY) as backend:
        load = FaultTest(backend, Servers(servers), PROMPTS, SAMPLING, expected, weights, pause=3.0, last=0.1)
        counts = load.run(seconds(12.0))
        assert counts.sampled and counts.scored and counts.kills and counts.stops and counts.updates
        fleet = backend.engine.plugin
        assert wait_until(lambda: {each.state for each in fleet.status()} == {"healthy"}, 300), fleet.status()
    put_back(servers, folder)


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
