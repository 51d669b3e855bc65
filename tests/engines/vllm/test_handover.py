"""Weights without a file on a real vLLM: in this process they are handed over, and the calls for a GPU are vLLM's own.

CUDA memory cannot be shared here, so what a worker does with it is not tested.
"""

from __future__ import annotations

import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

from corelm import Backend
from engines.vllm.test_weights import matches_model, model_of
from vllm_backend.handover import GpuHandover

Open = Callable[..., Backend]


@pytest.mark.parametrize("give", [dict, lambda state: iter(state.items())], ids=["state dict", "iterator"])
def test_no_file_is_written_for_a_worker_in_this_process(
    open_vllm: Open, give: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_vllm(engine="sync") as backend:
        # No temporary folder can be made from here on.
        monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
        backend.update_weights(give(model_of(1).state_dict()))
        assert matches_model(backend, model_of(1))
        backend.update_weights(give(model_of(2).state_dict()))
        assert matches_model(backend, model_of(2))


@pytest.mark.nightly
def test_tensors_that_are_not_on_a_gpu_go_through_a_file(
    open_vllm: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with caplog.at_level(logging.INFO, "vllm_backend"), open_vllm(weight_transfer_config={"backend": "ipc"}) as backend:
        for seed in (1, 2):
            backend.update_weights(model_of(seed).state_dict())
            assert matches_model(backend, model_of(seed))
    said = [record.getMessage() for record in caplog.records if "through files" in record.getMessage()]
    assert said == ["new weights go to vLLM through files, in memory if there is room: they are not on a GPU"]


def test_the_calls_for_a_gpu_are_those_of_this_version() -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk
    from vllm.v1.worker.gpu_worker import Worker

    calls: list[tuple[str, dict[str, Any]]] = []

    def call(method: Any, arguments: dict[str, Any]) -> list[Any]:
        if not isinstance(method, str):
            return [method(SimpleNamespace(device=0)) if torch.cuda.is_available() else "GPU-0"]
        inspect.signature(getattr(Worker, method)).bind(None, **arguments)
        calls.append((method, arguments))
        return [None]

    def pack(pairs: Iterator[tuple[str, Tensor]], device: int, size: int) -> Iterator[PackedIpcChunk]:
        for name, tensor in pairs:
            yield PackedIpcChunk(
                names=[name],
                shapes=[list(tensor.shape)],
                dtype_names=["float32"],
                tensor_sizes=[tensor.nbytes],
                ipc_handle={"GPU-0": ()},
            )

    handover = GpuHandover(call, pack, devices=["GPU-0"])
    assert handover.obstacle() == ""
    handover.load([("norm", torch.zeros(2))], largest=8)
    given = dict(calls)
    IPCWeightTransferInitInfo(**given["init_weight_transfer_engine"]["init_info"])
    IPCWeightTransferUpdateInfo(**given["update_weights"]["update_info"])
    assert {each.name for each in fields(PackedIpcChunk)} >= {
        *("names", "shapes", "dtype_names", "tensor_sizes", "ipc_handle")
    }
    inspect.signature(packed_ipc_producer).bind(iterator=iter(()), gpu_uuid="", post_iter_func=id, buffer_size_bytes=1)


def test_the_question_for_the_gpu_reaches_a_worker_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM passes the handles of GPU memory, and a function of this plugin, only if it is told to trust pickles."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    asked: list[Any] = []

    def call(function: Any, arguments: dict[str, Any]) -> list[Any]:
        asked.append(function)
        return []

    GpuHandover(call, devices=[]).obstacle()
    (uuid_of_gpu,) = asked
    handle = (torch.Tensor, torch.Size([4]), (1,), 0, torch.UntypedStorage, torch.uint8, 0, b"handle", 4, 0, False)
    sent = [uuid_of_gpu, {"ipc_handles": {"GPU-0": handle}}]
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        MsgpackEncoder().encode(sent)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    function, arguments = MsgpackDecoder().decode(MsgpackEncoder().encode(sent))
    found = arguments["ipc_handles"]["GPU-0"]
    # What torch rebuilds a tensor with takes a list as a size.
    assert function is uuid_of_gpu and [*found[:1], *map(tuple, found[1:3]), *found[3:]] == list(handle)
