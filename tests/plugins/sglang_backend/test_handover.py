"""Handles of tensors: what is in them, and the calls with which a launched server gets them. There is no GPU here."""

from __future__ import annotations

import base64
import logging
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from corelm import Backend
from corelm.errors import EngineError
from corelm_engine_kit import say_why_files
from helpers.http_server import json_reply
from helpers.tiny_models import tiny_model
from sglang_backend import handover

TENSORS = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.arange(4).to(torch.bfloat16)), ("c", torch.zeros(0))]


def test_another_process_reads_a_handle() -> None:
    turned = ("turned", torch.arange(6.0).view(2, 3).T.contiguous())
    bucket = [*TENSORS[:2], turned]
    code = (
        "import base64, pickle, sys, torch\n"
        "print([(name, tensor.tolist(), str(tensor.dtype)) for name, tensor in "
        "pickle.loads(base64.b64decode(sys.stdin.read()))])"
    )
    text = handover.handle(bucket)
    found = subprocess.run([sys.executable, "-c", code], input=text, text=True, capture_output=True, check=True)
    assert found.stdout.strip() == str(
        [(name, tensor.tolist(), str(tensor.dtype)) for name, tensor in [*TENSORS[:2], turned]]
    )


def test_tensors_on_the_cpu_need_room() -> None:
    tensors = [tensor for _, tensor in TENSORS]
    assert handover.obstacle(tensors, size=1) == ""
    assert "no room" in handover.obstacle(tensors, size=1 << 60)


@pytest.fixture
def launched(backend: Backend) -> Backend:
    """A backend that takes its fake server for one that it launched."""
    backend.engine.plugin.weights.takes_state_dict = True
    return backend


class Updates:
    """Answers the routes of an update in memory, and keeps what was posted to them."""

    def __init__(self, fake: Any, refuse: str = "") -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.fake, self.refuse = fake, refuse
        fake.fault = self

    def __call__(self, request: Any) -> Any:
        if "weight" not in request.path and request.path != "/flush_cache":
            return None
        body = dict(request.body)
        body["serialized_named_tensors"] = [read(each) for each in body.pop("serialized_named_tensors", ())]
        self.posted.append((request.path, {name: value for name, value in body.items() if value != []}))
        self.fake.weight_label = body.get("new_version", self.fake.weight_label)
        return json_reply({"success": request.path != self.refuse, "message": ""})

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.posted]


def read(text: str) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pickle.loads(base64.b64decode(text))}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_dict_is_handed_over_to_each_rank(launched: Backend, fake: Any, ranks: int) -> None:
    engine = launched.engine.plugin
    object.__setattr__(engine.info, "ranks", ranks)
    updates, state = Updates(fake), dict(tiny_model(seed=1).state_dict())
    places = {name: tensor.data_ptr() for name, tensor in state.items()}
    launched.update_weights(state, version="7")
    (_, given) = updates.posted[1]
    assert updates.posted == [
        ("/begin_weight_update", {}),
        ("/update_weights_from_tensor", given),
        ("/end_weight_update", {}),
        ("/flush_cache", {}),
        ("/update_weight_version", {"new_version": "7", "abort_all_requests": False}),
    ]
    assert given["flush_cache"] is False and len(given["serialized_named_tensors"]) == ranks
    for tensors in given["serialized_named_tensors"]:
        assert tensors.keys() == state.keys() and all(torch.equal(tensors[name], state[name]) for name in state)
    # The caller's tensors were not moved to shared memory.
    assert not any(tensor.is_shared() for tensor in state.values())
    assert places == {name: tensor.data_ptr() for name, tensor in state.items()}
    assert launched.score_logprobs([[5, 6]]).weight_versions == ("7",)


def test_an_update_that_fails_is_ended(launched: Backend, fake: Any) -> None:
    updates = Updates(fake, refuse="/update_weights_from_tensor")
    with pytest.raises(EngineError):
        launched.update_weights(tiny_model(seed=1).state_dict(), version="7")
    assert updates.paths == ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    assert launched.weight_version == "1"


def test_replicas_of_a_server_need_a_file_and_the_log_says_so_once(
    fake: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fake.server_info["dp_size"] = 2
    backend = connect()
    engine = backend.engine.plugin
    engine.weights.takes_state_dict = True
    assert engine.info.needs_file == "the server runs with dp_size=2"
    updates = Updates(fake)
    caplog.set_level(logging.INFO)
    say_why_files.cache_clear()
    for seed in (1, 2):
        backend.update_weights(tiny_model(seed=seed).state_dict())
    assert updates.paths == ["/update_weights_from_disk"] * 2
    assert [each for each in caplog.messages if "dp_size=2" in each] == [
        "new weights go to SGLang through files, in memory if there is room: the server runs with dp_size=2"
    ]
