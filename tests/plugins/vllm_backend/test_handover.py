"""`GpuHandover` makes exactly the calls that vLLM's IPC weight transfer needs. The worker is a fake: no GPU is here.

`tests/engines/vllm/test_handover.py` checks the same calls against the classes of a real vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from helpers.each import case
from vllm_backend.handover import GpuHandover


class FakeWorkers:
    """Answers `_uuid_of_gpu` with these UUIDs, and keeps the other calls."""

    def __init__(self, *uuids: str) -> None:
        self.uuids = list(uuids)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, method: str | Callable[[Any], str], arguments: dict[str, Any]) -> list[Any]:
        if not isinstance(method, str):
            return self.uuids
        self.calls.append((method, arguments))
        return [None]


def pack(pairs: Iterator[tuple[str, Tensor]], device: int, size: int) -> Iterator[Any]:
    """Make a chunk of each tensor, with the device and the size of the buffer as its handle."""
    for name, tensor in pairs:
        yield SimpleNamespace(
            names=[name],
            shapes=[list(tensor.shape)],
            dtype_names=["float32"],
            tensor_sizes=[tensor.nbytes],
            ipc_handle={f"GPU-{device}": (size,)},
        )


def test_the_calls_are_those_of_an_update_by_ipc() -> None:
    workers = FakeWorkers("GPU-1")
    handover = GpuHandover(workers, pack, devices=["GPU-0", "GPU-1"])
    assert handover.obstacle() == ""
    handover.load([("embed", torch.zeros(4, 2)), ("norm", torch.zeros(2))], largest=1 << 30)
    first, second = (
        {
            "names": [name],
            "dtype_names": ["float32"],
            "shapes": [shape],
            "ipc_handles": {"GPU-1": (1 << 30,)},
            "tensor_sizes": [size],
        }
        for name, shape, size in (("embed", [4, 2], 32), ("norm", [2], 8))
    )
    assert workers.calls == [
        ("init_weight_transfer_engine", {"init_info": {"packed": True}}),
        ("start_weight_update", {}),
        ("update_weights", {"update_info": first}),
        ("update_weights", {"update_info": second}),
        ("finish_weight_update", {}),
    ]


def test_small_tensors_share_a_buffer() -> None:
    workers = FakeWorkers("GPU-0")
    handover = GpuHandover(workers, pack, devices=["GPU-0"])
    assert handover.obstacle() == ""
    handover.load([("norm", torch.zeros(2))], largest=8)
    (handle,) = (
        arguments["update_info"]["ipc_handles"] for name, arguments in workers.calls if name == "update_weights"
    )
    assert handle == {"GPU-0": (1 << 28,)}


def test_other_engines_need_a_file() -> None:
    for uuids, why in [(["GPU-0", "GPU-1"], "2 workers"), (["GPU-7"], "not visible to this process")]:
        with case(uuids, why):
            assert why in GpuHandover(FakeWorkers(*uuids), pack, devices=["GPU-0", "GPU-1"]).obstacle()
