"""`WeightChannel` with vLLM's own trainer class, routes and server. NCCL needs GPUs, so it does not run here.

Where the class would call NCCL, stand-ins meet: all other lines of it run. The server is real in the last test only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import corelm
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from engines.vllm.launch import VLLMServerProcess
from helpers.fake_nccl import NcclRoutes, Wire
from helpers.fake_vllm import VOCAB, FakeVLLM
from helpers.http_server import PATIENCE, FaultServer
from helpers.tiny_models import tiny_model, tiny_tokenizer
from vllm_backend.weight_channel import WeightChannel, nccl_trainer

HERE = "127.0.0.1"


def channel_of(backend: corelm.Backend) -> WeightChannel:
    found: WeightChannel = backend.engine.plugin.channel
    return found


@pytest.mark.parametrize("give", [dict, lambda given: iter(given.items())], ids=["state dict", "iterator"])
def test_vllms_class_makes_the_calls_of_an_update(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, give: Any
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

    fake, wire = FakeVLLM(), Wire()
    fake.pages["/v1/models"]["data"][0]["root"] = str(tiny_folder)
    routes = NcclRoutes(fake, wire, workers=2)
    _, trainer, _ = nccl_trainer()

    def broadcast(self: Any, source: Any, meta: list[Any]) -> None:
        assert isinstance(self.client, VLLMWeightSyncClient)
        for _, tensor in self._checked_iter(source, meta):
            wire.tensors.put(tensor.clone())

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: wire.barrier.wait(PATIENCE) and None)
    monkeypatch.setattr(trainer, "_broadcast", broadcast)
    options = {"tokenizer": tiny_tokenizer(), "vocab_size": VOCAB, "weight_group": HERE}
    with FaultServer(fake) as server, corelm.get_backend("vllm", base_url=server.url, **options) as backend:
        channel_of(backend).device, channel_of(backend).chunk = torch.device("cpu"), 1 << 16
        for seed in (1, 2):
            expected = tiny_model(hidden_size=128, seed=seed).state_dict()
            backend.update_weights(give(expected))
            assert routes.loaded.keys() == expected.keys()
            assert all(torch.equal(routes.loaded[name], tensor) for name, tensor in expected.items())
    paths = routes.paths()
    assert [paths.count(f"/{name}_weight_update") for name in ("start", "finish")] == [2, 2]
    assert paths.count("/update_weights") > 4 and paths[0] == "/init_weight_transfer_engine"
    assert paths[-1] == "/shutdown_weight_transfer_engine" and paths.count(paths[0]) == paths.count(paths[-1]) == 1
    check_bodies_of(routes)


def check_bodies_of(routes: NcclRoutes) -> None:
    """Compare what was sent with what vLLM's workers read."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
    from vllm.v1.worker.gpu_worker import Worker

    for path, body in routes.calls:
        if path == "/init_weight_transfer_engine":
            info = NCCLWeightTransferInitInfo(**body["init_info"])
            assert (info.world_size, info.rank_offset, info.master_address) == (3, 1, HERE)
            inspect.signature(Worker.init_weight_transfer_engine).bind(None, **body)
        elif path == "/update_weights":
            assert NCCLWeightTransferUpdateInfo(**body["update_info"]).names
            inspect.signature(Worker.update_weights).bind(None, **body)


def test_the_server_has_the_routes() -> None:
    from vllm.entrypoints.rl.online import api_router

    needed = {path for path in NcclRoutes.PATHS if "weight" in path} | {"/get_world_size", "/pause", "/resume"}
    assert needed <= {route.path for route in api_router.router.routes}
    assert "init_info" in inspect.signature(api_router.init_weight_transfer_engine).parameters
    assert "update_info" in inspect.signature(api_router.update_weights).parameters


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerProcess]:
    log = tmp_path_factory.mktemp("log") / "nccl.txt"
    with VLLMServerProcess(tiny_folder, log, "--weight-transfer-config", '{"backend": "nccl"}') as running:
        yield running


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.nightly
def test_a_server_on_a_cpu_does_not_join(server: VLLMServerProcess) -> None:
    """It starts with the option, says so, and fails when it is asked to join. Its weights stay."""
    new = tiny_model(hidden_size=128, seed=1)
    with corelm.get_backend("vllm", base_url=server.url, api_key=server.key, weight_group=HERE) as backend:
        before = backend.generate([[5, 6, 7]], {"max_new_tokens": 4, "temperature": 0.0}).ids.tolist()
        with pytest.raises(CapabilityError, match="from a GPU"):
            backend.update_weights(new)
        assert backend.weight_version == "0"
        channel_of(backend).device = torch.device("cpu")
        with pytest.raises(EngineError, match=r"did not join this process at 127\.0\.0\.1.*accelerator"):
            backend.update_weights(new)
        assert backend.generate([[5, 6, 7]], {"max_new_tokens": 4, "temperature": 0.0}).ids.tolist() == before


def test_the_option_belongs_to_a_server(tiny_folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="needs base_url") as caught:
        corelm.get_backend("vllm", tiny_folder, weight_group=HERE)
    assert caught.value.field == "weight_group"
