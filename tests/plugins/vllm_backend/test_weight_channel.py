"""`WeightChannel`: tensors for a server on another node. The server, its workers and vLLM's class are stand-ins.

No GPU is here, so NCCL does not run. `tests/engines/vllm/test_weight_channel.py` compares what is called with the
classes and routes of a real vLLM.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corelm import Backend
from corelm.errors import BackendTimeoutError, CapabilityError, EngineError, InvalidRequestError
from corelm_engine_kit import WeightGroup
from helpers.fake_nccl import NcclRoutes, NCCLTrainerWeightTransferEngine, Wire, stand_in
from helpers.fake_vllm import PROMPTS, SAMPLING, Connect, FakeVLLM
from helpers.http_server import Reply, Request
from helpers.tiny_models import tiny_model

HERE = "127.0.0.1"
#: The requests of one update, from the first pause to the end.
UPDATE = [
    *("/pause", "/update_weight_version", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/reset_prefix_cache", "/update_weight_version", "/resume"),
]

Trainer = type[NCCLTrainerWeightTransferEngine]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def routes(fake: FakeVLLM, wire: Wire, tmp_path: Path) -> NcclRoutes:
    tiny_model(hidden_size=128).save_pretrained(tmp_path)
    fake.pages["/v1/models"]["data"][0]["root"] = str(tmp_path)
    return NcclRoutes(fake, wire)


@pytest.fixture
def trainer(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """vLLM's trainer class, as this process imports it."""
    modules, engine = stand_in(wire)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return engine


@pytest.fixture
def joined(connect: Connect, routes: NcclRoutes, trainer: Trainer) -> Callable[..., Backend]:
    """``joined(**options)`` opens a backend that sends tensors from this machine's memory, since it has no GPU."""

    def make(weight_group: Any = HERE, **options: Any) -> Backend:
        backend = connect(weight_group=weight_group, **options)
        backend.engine.plugin.channel.device = torch.device("cpu")
        return backend

    return make


def new_weights(seed: int) -> dict[str, Tensor]:
    return tiny_model(hidden_size=128, seed=seed).state_dict()


def has(routes: NcclRoutes, weights: dict[str, Tensor]) -> bool:
    return routes.loaded.keys() == weights.keys() and all(
        torch.equal(routes.loaded[name], tensor) for name, tensor in weights.items()
    )


def no_thread_is_left() -> bool:
    return not any(thread.name == "corelm-nccl" for thread in threading.enumerate())


def test_a_state_dict_reaches_the_workers_of_a_server(
    joined: Callable[..., Backend], routes: NcclRoutes, trainer: Trainer
) -> None:
    backend = joined(WeightGroup(HERE))
    assert backend.update_weights(new_weights(1), version="tuned") == "tuned"
    assert has(routes, new_weights(1))
    assert routes.paths() == ["/init_weight_transfer_engine", *UPDATE] and trainer.log == ["join", "send"]
    info = routes.calls[0][1]["init_info"]
    assert 0 < info.pop("master_port") < 2**16
    assert info == {
        "master_address": HERE,
        "rank_offset": 1,
        "world_size": 1 + routes.workers,
        "packed": True,
        "packed_buffer_size_bytes": 1 << 50,
        "packed_num_buffers": 2,
    }
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("tuned",) * 3
    assert no_thread_is_left()


def test_a_group_is_kept_until_the_backend_is_closed(
    joined: Callable[..., Backend], routes: NcclRoutes, trainer: Trainer
) -> None:
    backend = joined()
    for seed in (1, 2):
        backend.update_weights(tiny_model(hidden_size=128, seed=seed))
        assert has(routes, new_weights(seed))
    backend.close()
    assert routes.paths() == ["/init_weight_transfer_engine", *UPDATE, *UPDATE, "/shutdown_weight_transfer_engine"]
    assert trainer.log == ["join", "send", "send", "leave"] and no_thread_is_left()


def test_a_server_that_was_restarted_joins_again(
    joined: Callable[..., Backend], routes: NcclRoutes, trainer: Trainer
) -> None:
    backend = joined()
    backend.update_weights(new_weights(1))
    routes.version = "default"
    backend.update_weights(new_weights(2))
    assert has(routes, new_weights(2)) and trainer.log == ["join", "send", "leave", "join", "send"]


def test_an_iterator_is_sent_in_parts_that_may_use_the_same_memory(
    joined: Callable[..., Backend], routes: NcclRoutes, trainer: Trainer
) -> None:
    largest = max(tensor.nbytes for tensor in new_weights(1).values())
    backend = joined()
    # The default would hold this small model.
    backend.engine.plugin.channel.chunk = largest // 2
    memory = torch.empty(largest // 4)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in new_weights(1).items():
            yield name, memory[: tensor.numel()].view(tensor.shape).copy_(tensor)

    backend.update_weights(gathered())
    assert has(routes, new_weights(1))
    parts = [body["update_info"]["names"] for path, body in routes.calls if path == "/update_weights"]
    assert len(parts) == trainer.log.count("send") > 2 and max(map(len, parts)) > 1
    assert routes.paths().count("/start_weight_update") == routes.paths().count("/finish_weight_update") == 1


@pytest.mark.parametrize("give", [dict, lambda given: iter(given.items())], ids=["state dict", "iterator"])
def test_weights_that_do_not_fit_change_nothing(
    joined: Callable[..., Backend], routes: NcclRoutes, give: Callable[[Any], Any]
) -> None:
    backend = joined()
    name, tensor = next(iter(new_weights(1).items()))
    with pytest.raises(InvalidRequestError):
        backend.update_weights(give({name: tensor[:1]}))
    assert routes.calls == [] and backend.weight_version == "0"


def test_an_iterator_that_stops_fitting_leaves_a_server_that_takes_other_weights(
    joined: Callable[..., Backend], routes: NcclRoutes
) -> None:
    backend = joined()
    with pytest.raises(EngineError, match=r"not in force.*unexpected 'more'"):
        backend.update_weights(iter([*new_weights(1).items(), ("more", torch.zeros(1))]))
    assert routes.paths()[-1] == "/resume" and not routes.active
    with pytest.raises(EngineError):
        backend.generate(PROMPTS, SAMPLING)
    backend.update_weights(new_weights(2), version="again")
    assert has(routes, new_weights(2))
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("again",) * 3


@pytest.mark.parametrize(
    "path", ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
)
def test_a_step_that_the_server_refuses_ends_the_update_at_once(
    joined: Callable[..., Backend], routes: NcclRoutes, trainer: Trainer, path: str
) -> None:
    """The stand-in goes on waiting for the workers, as vLLM's class does."""
    backend = joined(max_retries=0)
    routes.refused.add(path)
    over = threading.Event()
    if path == "/update_weights":
        trainer.before_send = staticmethod(lambda: over.wait(60))
    try:
        with pytest.raises(EngineError, match=f"{path} failed in this test"):
            backend.update_weights(new_weights(1))
    finally:
        over.set()
        routes.wire.barrier.abort()
    if path == "/init_weight_transfer_engine":
        assert "/pause" not in routes.paths() and routes.version == "default"
    else:
        assert routes.paths()[-1] == "/resume" and "leave" in trainer.log
        with pytest.raises(EngineError):
            backend.generate(PROMPTS, SAMPLING)


def test_workers_that_never_join_are_waited_for_in_vain(
    joined: Callable[..., Backend], fake: FakeVLLM, routes: NcclRoutes
) -> None:
    gate = threading.Event()
    answer = fake.fault

    def late(request: Request) -> Reply | None:
        if request.path == "/init_weight_transfer_engine":
            gate.wait(60)
        return answer(request)

    fake.fault = late
    backend = joined(WeightGroup(HERE, port := WeightGroup(HERE).address()[1]))
    backend.engine.plugin.channel.join_timeout = 0.2
    try:
        with pytest.raises(BackendTimeoutError, match=f"did not join this process at {HERE}:{port} within 0.2 s"):
            backend.update_weights(new_weights(1))
    finally:
        routes.wire.barrier.abort()
        gate.set()


def test_tensors_that_are_not_taken_are_waited_for_in_vain(
    joined: Callable[..., Backend], routes: NcclRoutes, trainer: Trainer
) -> None:
    backend = joined()
    backend.engine.plugin.channel.step_timeout = 0.2
    stuck = threading.Event()
    trainer.before_send = staticmethod(lambda: stuck.wait(60))
    # vLLM's class aborts NCCL's calls when it is shut down, so that the one that waits ends.
    trainer.shutdown = lambda self: stuck.set()
    with pytest.raises(BackendTimeoutError, match=r"did not take the tensors within 0\.2 s\. Restart it"):
        backend.update_weights(new_weights(1))
    assert stuck.is_set()


def test_without_the_option_the_message_names_it(connect: Connect, routes: NcclRoutes) -> None:
    with pytest.raises(CapabilityError, match="weight_group="):
        connect().update_weights(new_weights(1))
    assert routes.calls == []


@pytest.mark.parametrize("page", [{}, {"weight_transfer_config": None}, {"weight_transfer_config": {"backend": "ipc"}}])
def test_a_server_that_takes_no_tensors_over_nccl_is_refused_when_it_is_opened(
    connect: Connect, fake: FakeVLLM, routes: NcclRoutes, page: dict[str, Any]
) -> None:
    fake.pages["/server_info?config_format=json"] = {"vllm_config": page}
    with pytest.raises(InvalidRequestError, match=r"--weight-transfer-config '\{\"backend\": \"nccl\"\}'") as caught:
        connect(weight_group=HERE)
    assert caught.value.field == "weight_group" and ("'ipc'" in str(caught.value)) is ("ipc" in str(page))


def test_a_trainer_without_vllm_is_told_what_to_install(
    connect: Connect, routes: NcclRoutes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    backend = connect(weight_group=HERE)
    with pytest.raises(CapabilityError, match=r"plugins/vllm_backend\[engine\]"):
        backend.update_weights(new_weights(1))
    assert routes.calls == [] and backend.weight_version == "0"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_trainer_without_a_gpu_is_told_so(connect: Connect, routes: NcclRoutes, trainer: Trainer) -> None:
    with pytest.raises(CapabilityError):
        connect(weight_group=HERE).update_weights(new_weights(1))
    assert routes.calls == [] and trainer.log == []


@pytest.mark.parametrize("host", ["192.0.2.1", HERE])
def test_a_place_where_this_process_cannot_wait_is_refused(
    joined: Callable[..., Backend], routes: NcclRoutes, host: str
) -> None:
    with socket.create_server((HERE, 0)) as taken:
        with pytest.raises(InvalidRequestError) as caught:
            joined(WeightGroup(host, taken.getsockname()[1])).update_weights(new_weights(1))
        assert caught.value.field == "weight_group" and routes.calls == []


def test_names_need_a_checkpoint_to_be_compared_with(
    joined: Callable[..., Backend], fake: FakeVLLM, routes: NcclRoutes
) -> None:
    fake.pages["/v1/models"]["data"][0]["root"] = "/nowhere/to-be/read"
    with pytest.raises(InvalidRequestError):
        joined().update_weights(new_weights(1))
    assert routes.calls == []
