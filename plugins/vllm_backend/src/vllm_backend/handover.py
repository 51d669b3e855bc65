"""`GpuHandover`: new weights for vLLM's worker in the memory of its GPU (CUDA IPC), so no file is written.

This is the data path of vLLM's own `IPCTrainerWeightTransferEngine`. That class also gathers handles from all ranks of
the trainer's process group, and would wait for ranks that do not update an engine at this moment.

Not yet run on a GPU: written against the sources of vLLM 0.32 and tested with a fake worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

#: Calls a method of all workers with these arguments and returns what each of them returned.
CallWorkers = Callable[[Any, dict[str, Any]], list[Any]]

#: Bytes that are copied at a time, or as many as the largest tensor has.
_BUFFER = 1 << 28


#: Packs tensors into a buffer that other processes can open, again and again: vLLM's `packed_ipc_producer`.
Pack = Callable[[Iterator[tuple[str, Tensor]], int, int], Iterator[Any]]


class GpuHandover:
    """Hands weights to the one worker of an engine that was opened with ``weight_transfer_config={"backend": "ipc"}``.

    Args:
        call: calls vLLM's workers.
        pack: packs tensors; another function in tests.
        devices: the UUIDs of this process's GPUs, in order; None to ask torch.
    """

    def __init__(self, call: CallWorkers, pack: Pack | None = None, devices: list[str] | None = None) -> None:
        self._call = call
        self._pack = pack or _packed
        self._devices = devices
        self._device: int | None = None

    def obstacle(self) -> str:
        """Return why the worker's GPU cannot be reached from this process; empty if it can."""
        uuids = self._call(_uuid_of_gpu, {})
        if len(uuids) != 1:
            return f"the engine has {len(uuids)} workers, and this way reaches one"
        devices = _uuids() if self._devices is None else self._devices
        if uuids[0] not in devices:
            return "the engine's GPU is not visible to this process"
        self._device = devices.index(uuids[0])
        return ""

    def load(self, tensors: Iterable[tuple[str, Tensor]], largest: int) -> None:
        """Load all tensors. They may be on any device; each is copied to the worker's GPU and then into the model."""
        assert self._device is not None, "there is an obstacle"
        self._call("init_weight_transfer_engine", {"init_info": {"packed": True}})
        self._call("start_weight_update", {})
        for chunk in self._pack(iter(tensors), self._device, max(_BUFFER, largest)):
            # The worker has copied the buffer when this returns, so it can be filled again.
            update = {
                "names": chunk.names,
                "dtype_names": chunk.dtype_names,
                "shapes": chunk.shapes,
                "ipc_handles": chunk.ipc_handle,
                "tensor_sizes": chunk.tensor_sizes,
            }
            self._call("update_weights", {"update_info": update})
        self._call("finish_weight_update", {})


def _uuid_of_gpu(worker: Any) -> str:
    """Runs in a worker, which gets it by name: this package is installed there."""
    return str(torch.cuda.get_device_properties(worker.device).uuid)


def _uuids() -> list[str]:
    return [str(torch.cuda.get_device_properties(device).uuid) for device in range(torch.cuda.device_count())]


def _packed(tensors: Iterator[tuple[str, Tensor]], device: int, size: int) -> Iterator[Any]:
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    with torch.cuda.device(device):
        chunks: Iterator[Any] = packed_ipc_producer(
            iterator=tensors,
            gpu_uuid=_uuids()[device],
            post_iter_func=lambda pair: pair[1].detach(),
            buffer_size_bytes=size,
        )
        yield from chunks
        torch.cuda.ipc_collect()
