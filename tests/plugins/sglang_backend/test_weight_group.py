"""Tensors for a server on another machine: what a fake server is told and receives, and what failures leave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import corelm
from corelm import Backend
from corelm.errors import BackendTimeoutError, CapabilityError, EngineError, InvalidRequestError
from corelm.spec import WeightUpdate
from corelm_engine_kit import WeightGroup
from helpers.http_server import Reply, Request, hang, json_reply, raw
from helpers.tiny_models import VOCAB, tiny_model

JOIN, RECEIVE, LEAVE = "/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
FLUSH, LABEL = "/flush_cache", "/update_weight_version"
DONE = {"success": True, "message": ""}
C10D: Any = distributed


class Receiver:
    """Joins, receives and leaves as SGLang's processes do, with gloo.

    Attributes:
        calls: path and body of every request that changes weights.
        received: the tensors that each process received.
        instead: what a path is answered with, instead of what it asks for.
    """

    def __init__(self, fake: Any, ranks: int) -> None:
        self._fake, self._ranks = fake, ranks
        self._groups: dict[str, list[Any]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.received: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
        self.instead: dict[str, Reply] = {}

    def __call__(self, request: Request) -> Reply | None:
        routes: dict[str, Callable[[Any], None]] = {
            BEGIN: lambda body: None,
            END: lambda body: None,
            JOIN: self._join,
            RECEIVE: self._receive,
            LEAVE: self._leave,
            LABEL: self._label,
        }
        if request.path == FLUSH:
            return raw(b"Cache flushed.\n")
        if request.path not in routes:
            return None
        self.calls.append((request.path, request.body))
        if request.path in self.instead:
            return self.instead[request.path]
        try:
            routes[request.path](request.body)
        except (RuntimeError, KeyError) as error:
            return json_reply({"success": False, "message": str(error)}, 400)
        return json_reply(DONE)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def lose_groups(self) -> None:
        """What a restart does."""
        self._groups.clear()

    def _join(self, body: dict[str, Any]) -> None:
        limit = timedelta(seconds=20)

        def member(rank: int) -> Any:
            store = C10D.TCPStore(body["master_address"], body["master_port"], timeout=limit, wait_for_workers=False)
            for prefix in (body["group_name"], f"{body['group_name']}/", "cpu/"):
                store = C10D.PrefixStore(prefix, store)
            return distributed.ProcessGroupGloo(store, rank, body["world_size"], limit)

        ranks = range(body["rank_offset"], body["rank_offset"] + self._ranks)
        self._groups[body["group_name"]] = self._each(member, ranks)

    def _receive(self, body: dict[str, Any]) -> None:
        def receive(group: Any) -> dict[str, Tensor]:
            found = {}
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                group.broadcast([found[name]], distributed.BroadcastOptions()).wait()
            return found

        for mine, found in zip(self.received, self._each(receive, self._groups[body["group_name"]]), strict=True):
            mine.update(found)

    def _leave(self, body: dict[str, Any]) -> None:
        del self._groups[body["group_name"]]

    def _label(self, body: dict[str, Any]) -> None:
        self._fake.weight_label = body["new_version"]

    def _each(self, call: Callable[[Any], Any], given: Any) -> list[Any]:
        with ThreadPoolExecutor(self._ranks) as pool:
            return list(pool.map(call, given))


@pytest.fixture
def receiver(fake: Any) -> Receiver:
    fake.fault = Receiver(fake, ranks=1)
    return fake.fault  # type: ignore[no-any-return]


@pytest.fixture
def state() -> dict[str, Tensor]:
    return dict(tiny_model(seed=1).state_dict())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("corelm-weights")]


def alike(found: dict[str, Tensor], state: dict[str, Tensor]) -> bool:
    return bool(found) and all(torch.equal(tensor, state[name]) for name, tensor in found.items())


def test_every_process_of_the_server_is_sent_every_tensor(connect, fake, state):
    fake.server_info["tp_size"] = 2
    receiver = fake.fault = Receiver(fake, ranks=2)
    backend = connect(weight_group="127.0.0.1")
    assert backend.update_weights(state, version="7") == "7"
    assert receiver.paths == [BEGIN, JOIN, RECEIVE, END, LABEL]
    joined, sent = receiver.calls[1][1], receiver.calls[2][1]
    assert joined.pop("master_port") > 0 and joined.pop("group_name") == sent["group_name"]
    assert joined == {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 3, "backend": "gloo"}
    assert sent["flush_cache"] is False and set(sent["dtypes"]) == {"float32"}
    assert all(alike(found, state) for found in receiver.received)
    assert receiver.received[0].keys() == receiver.received[1].keys() == {*sent["names"]}
    assert backend.score_logprobs([[5, 6]]).weight_versions == ("7",)


def test_the_group_is_made_once_and_left_when_the_backend_closes(connect, receiver: Receiver, state):
    backend: Backend = connect(weight_group=WeightGroup("127.0.0.1"))
    half = {name: tensor.bfloat16() for name, tensor in state.items()}
    backend.update_weights(state)
    backend.update_weights(half)
    assert receiver.paths.count(JOIN) == 1 and alike(receiver.received[0], half)
    backend.update_weights(iter(state.items()))
    assert receiver.paths.count(JOIN) == 1 and alike(receiver.received[0], state)
    assert LEAVE not in receiver.paths
    backend.close()
    assert receiver.calls[-1] == (LEAVE, {"group_name": receiver.calls[1][1]["group_name"]})


def test_many_buckets_are_one_update(connect, receiver: Receiver, state):
    engine = connect(weight_group="127.0.0.1").engine.plugin.weights
    engine.broadcast(state.items(), WeightUpdate(version="buckets", when="drain"), bucket_size=20_000)
    assert receiver.paths.count(RECEIVE) > 2 and receiver.paths.count(BEGIN) == receiver.paths.count(END) == 1
    assert receiver.received[0].keys() == state.keys() and alike(receiver.received[0], state)


def test_weights_that_do_not_fit_are_not_sent(connect, receiver: Receiver, state):
    backend = connect(weight_group="127.0.0.1")
    wrong = {**state, "model.norm.weight": torch.zeros(3)}
    for given, field in ((wrong, "state_dict"), (iter(wrong.items()), "weights"), (iter([]), "weights")):
        with pytest.raises(InvalidRequestError) as caught:
            backend.update_weights(given)
        assert caught.value.field == field
    assert receiver.calls == [] and backend.weight_version == "0"


def test_names_and_shapes_of_a_configuration_do(connect, fake, receiver: Receiver, state, tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    fake.model_info["model_path"] = fake.server_info["model_path"] = str(tmp_path)
    backend = connect(weight_group="127.0.0.1")
    with pytest.raises(InvalidRequestError):
        backend.update_weights({**state, "model.norm.weight": torch.zeros(3)})
    backend.update_weights(state)
    assert alike(receiver.received[0], state)


def test_why_a_configuration_gives_no_names_is_said(connect, fake, receiver: Receiver, state, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "from-another-planet"}')
    fake.model_info["model_path"] = fake.server_info["model_path"] = str(tmp_path)
    backend = connect(weight_group="127.0.0.1", vocab_size=VOCAB, max_context=64)
    with pytest.raises(CapabilityError, match=r"(?s)^weight_group: .*from-another-planet") as caught:
        backend.update_weights(state)
    assert caught.value.capability == "update_weights" and receiver.calls == [] and backend.weight_version == "0"


def test_a_path_is_still_read_by_the_server(connect, fake, receiver: Receiver, other_folder):
    connect(weight_group="127.0.0.1").update_weights(other_folder)
    assert fake.weight_updates[0]["model_path"] == str(other_folder) and receiver.calls == []


def test_a_restarted_server_joins_again(connect, fake, receiver: Receiver, state):
    backend = connect(weight_group="127.0.0.1")
    backend.update_weights(state, version="7")
    fake.weight_label = "default"
    receiver.lose_groups()
    backend.update_weights(state, version="8")
    assert receiver.paths.count(JOIN) == 2
    assert backend.score_logprobs([[5, 6]]).weight_versions == ("8",)


@pytest.mark.parametrize("path", [JOIN, RECEIVE])
def test_a_server_that_refuses_is_an_error_and_is_asked_again_the_next_time(
    connect, receiver: Receiver, state, path: str
):
    backend = connect(weight_group="127.0.0.1")
    receiver.instead[path] = json_reply({"success": False, "message": "no room"}, 400)
    with pytest.raises((EngineError, InvalidRequestError)):
        backend.update_weights(state)
    assert receiver.paths[-2:] == [LEAVE, END]
    receiver.instead.clear()
    backend.update_weights(state)
    assert alike(receiver.received[0], state)


@pytest.mark.parametrize("path", [JOIN, RECEIVE])
def test_a_server_that_hangs_is_a_timeout(connect, receiver: Receiver, state, path: str):
    backend = connect(weight_group="127.0.0.1", read_timeout=1.0)
    receiver.instead[path] = hang()
    with pytest.raises(BackendTimeoutError):
        backend.update_weights(state)
    receiver.instead.clear()
    backend.update_weights(state)
    assert alike(receiver.received[0], state)


def test_a_server_that_only_says_that_it_joined_is_an_error(connect, receiver: Receiver, state):
    backend = connect(weight_group="127.0.0.1", read_timeout=1.0)
    receiver.instead[JOIN] = json_reply(DONE)
    with pytest.raises(EngineError):
        backend.update_weights(state)


def test_a_port_that_is_taken_is_refused(connect, receiver: Receiver, state):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        backend = connect(weight_group=WeightGroup("127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(InvalidRequestError) as caught:
            backend.update_weights(state)
        assert caught.value.field == "weight_group" and JOIN not in receiver.paths


def test_a_given_port_is_used_again(connect, fake, receiver: Receiver, state):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    backend = connect(weight_group=WeightGroup("127.0.0.1", port))
    for label in ("default", "other"):
        fake.weight_label = label
        backend.update_weights(state)
    joined = [body["master_port"] for path, body in receiver.calls if path == JOIN]
    assert joined == [port, port]


@pytest.mark.parametrize("setting", ["dp_size", "pp_size"])
def test_replicas_and_stages_are_refused_when_the_backend_is_opened(connect, fake, setting: str):
    fake.server_info[setting] = 2
    with pytest.raises(CapabilityError, match=f"weight_group: the server runs with {setting}=2.*path"):
        connect(weight_group="127.0.0.1")
    connect()


def test_the_option_is_for_a_server_behind_a_url(folder, connect):
    with pytest.raises(InvalidRequestError) as caught:
        corelm.get_backend("sglang", folder, weight_group="127.0.0.1")
    assert caught.value.field == "weight_group"
    with pytest.raises(InvalidRequestError):
        connect(weight_group="tcp://127.0.0.1:1")


def test_without_the_option_a_state_dict_is_refused(backend: Backend, state):
    with pytest.raises(CapabilityError, match="weight_group='HOST'"):
        backend.update_weights(state)
