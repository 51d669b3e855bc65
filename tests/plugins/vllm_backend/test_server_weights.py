"""New weights for a server, and results that always name the weights they were made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from helpers.fake_vllm import PROMPTS, SAMPLING, Connect, FakeVLLM
from helpers.http_server import FaultServer, Reply, Request, json_reply
from helpers.tiny_models import tiny_model


class WeightRoutes:
    """Adds the routes of vLLM's development mode to a `FakeVLLM`.

    Attributes:
        version: the server's name for its weights.
        keeps_cache: whether resetting the prefix cache fails.
        calls: the paths of the requests that change weights, in order.
    """

    PATHS = ("/collective_rpc", "/pause", "/reset_prefix_cache", "/resume", "/update_weight_version")

    def __init__(self, fake: FakeVLLM) -> None:
        self.version = "default"
        self.keeps_cache = False
        self.calls: list[str] = []
        fake.pages["/openapi.json"]["paths"] |= {path: {} for path in (*self.PATHS, "/weight_info")}
        fake.fault = self

    def __call__(self, request: Request) -> Reply | None:
        path = request.path.partition("?")[0]
        if path == "/weight_info":
            return json_reply({"weight_version": self.version})
        if path not in self.PATHS:
            return None
        self.calls.append(request.path)
        if path == "/update_weight_version":
            self.version = request.body["new_version"]
        return json_reply({"success": not self.keeps_cache} if path == "/reset_prefix_cache" else {})


@pytest.fixture
def routes(fake: FakeVLLM) -> WeightRoutes:
    return WeightRoutes(fake)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model(hidden_size=128).save_pretrained(tmp_path)
    return tmp_path


def test_a_server_without_the_routes_takes_no_weights(connect: Connect, checkpoint: Path) -> None:
    backend = connect()
    assert not backend.capabilities.update_weights
    with pytest.raises(CapabilityError):
        backend.update_weights(checkpoint)


@pytest.mark.parametrize(
    ("family", "device", "taken"),
    [
        ("qwen3-moe", "cpu", False),
        ("qwen2-tied", "cpu", False),
        ("qwen2", "cpu", True),
        ("qwen3-moe", "cuda", True),
        ("qwen2-tied", "cuda", True),
        ("qwen3-moe", None, True),
    ],
)
def test_a_server_on_a_cpu_takes_no_weights_that_it_cannot_load_again(
    connect: Connect, fake: FakeVLLM, routes: WeightRoutes, tmp_path: Path, family: str, device: str | None, taken: bool
) -> None:
    """The page is vLLM 0.32's; a page without the device says nothing."""
    tiny_model(family, hidden_size=128).save_pretrained(tmp_path)
    fake.pages["/v1/models"]["data"][0]["root"] = str(tmp_path)
    fake.pages["/openapi.json"]["paths"]["/server_info"] = {}
    fake.pages["/server_info?config_format=json"] = {
        "vllm_config": {} if device is None else {"device_config": {"device": device}}
    }
    backend = connect()
    assert backend.capabilities.update_weights is taken
    if not taken:
        way = "lm_head.weight" if family == "qwen2-tied" else "another engine"
        with pytest.raises(CapabilityError, match=f"lacks update_weights: on a CPU.*{way}"):
            backend.update_weights(tmp_path)
        assert not routes.calls


def test_a_server_that_does_not_tell_what_it_runs_with_opens(
    connect: Connect, server: FaultServer, fake: FakeVLLM, routes: WeightRoutes, tmp_path: Path
) -> None:
    tiny_model("qwen3-moe", hidden_size=128).save_pretrained(tmp_path)
    fake.pages["/v1/models"]["data"][0]["root"] = str(tmp_path)
    fake.pages["/openapi.json"]["paths"]["/server_info"] = {}
    assert connect().capabilities.update_weights
    # vLLM collects the page for some seconds, so it is read once.
    assert server.paths().count("/server_info?config_format=json") == 1


def test_weights_are_loaded_while_the_server_is_paused_and_the_cache_is_emptied(
    connect: Connect, routes: WeightRoutes, checkpoint: Path
) -> None:
    backend = connect()
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("0",) * 3
    assert backend.update_weights(checkpoint, version="tuned") == "tuned"
    assert routes.calls == [
        "/pause?mode=wait",
        "/update_weight_version",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("tuned",) * 3


def test_calls_fail_after_the_server_has_lost_the_weights(
    connect: Connect, routes: WeightRoutes, checkpoint: Path
) -> None:
    backend = connect()
    backend.update_weights(checkpoint, version="tuned")
    # As after a restart.
    routes.version = "default"
    for call in (
        lambda: backend.generate(PROMPTS, SAMPLING),
        lambda: backend.generate(PROMPTS, SAMPLING),
        lambda: backend.score_logprobs([[5, 6, 7]]),
    ):
        with pytest.raises(EngineError, match="update_weights again"):
            call()
    backend.update_weights(checkpoint, version="again")
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("again",) * 3


def test_rows_are_labelled_with_the_weights_of_another_client(
    connect: Connect, fake: FakeVLLM, routes: WeightRoutes
) -> None:
    backend = connect()
    routes.version = "theirs"
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("theirs",) * 3

    def load_others(choice: dict[str, Any]) -> None:
        routes.version = "later"

    fake.spoil = load_others
    with pytest.raises(EngineError, match="during the call"):
        backend.generate(PROMPTS, SAMPLING)
    assert backend.score_logprobs([[5, 6, 7]]).weight_versions == ("later",)


def test_weights_are_not_in_force_if_the_server_keeps_its_cache(
    connect: Connect, routes: WeightRoutes, checkpoint: Path
) -> None:
    backend = connect(max_retries=0)
    routes.keeps_cache = True
    with pytest.raises(EngineError):
        backend.update_weights(checkpoint, version="tuned")
    # They may have changed, so they are not called "0" any longer, nor "tuned".
    assert routes.calls[-1] == "/resume" and backend.weight_version == "1"
    with pytest.raises(EngineError, match="update_weights again"):
        backend.generate(PROMPTS, SAMPLING)


def test_a_missing_folder_and_a_state_dict_are_refused(connect: Connect, routes: WeightRoutes, tmp_path: Path) -> None:
    backend = connect()
    with pytest.raises(InvalidRequestError):
        backend.update_weights(tmp_path / "nothing")
    with pytest.raises(CapabilityError):
        backend.update_weights({})
    assert routes.calls == [] and backend.generate(PROMPTS, SAMPLING).weight_versions == ("0",) * 3


def test_weights_that_do_not_fit_the_servers_checkpoint_are_refused(
    connect: Connect, fake: FakeVLLM, routes: WeightRoutes, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fake.pages["/v1/models"]["data"][0]["root"] = str(checkpoint)
    other = tmp_path_factory.mktemp("other")
    tiny_model(hidden_size=64).save_pretrained(other)
    backend = connect()
    with pytest.raises(InvalidRequestError) as caught:
        backend.update_weights(other)
    assert caught.value.field == "path" and routes.calls == []


def test_the_cache_is_emptied_when_the_owner_has_changed_the_weights(connect: Connect, routes: WeightRoutes) -> None:
    backend = connect()
    assert backend.weights_changed("trained") == "trained"
    assert routes.calls == [
        "/pause?mode=wait",
        "/update_weight_version",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("trained",) * 3


def test_a_server_without_the_routes_gets_the_label_of_the_owners_weights(connect: Connect) -> None:
    backend = connect()
    assert backend.weights_changed() == "1"
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("1",) * 3
