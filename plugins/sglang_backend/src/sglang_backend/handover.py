"""Handles of tensors, by which a server on this machine reads them from shared memory, or from the memory of a GPU.

SGLang unpickles what torch.multiprocessing would send. It is pickled here, so that this process needs no SGLang.

From a GPU (CUDA IPC) it was not yet run: that part is written against the sources of SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

#: Bytes of tensors after which a bucket is loaded.
BUCKET = 1 << 29

#: Where torch keeps shared memory.
_SHARED_MEMORY = "/dev/shm"
#: The place of the device in the arguments with which a tensor on a GPU is rebuilt.
_DEVICE = 6

Pairs = list[tuple[str, Tensor]]


def obstacle(tensors: Iterable[Tensor], size: int = BUCKET) -> str:
    """Return why these tensors cannot be handed over; empty if they can: all are on GPUs, or all are on the CPU.

    Args:
        size: bytes after which a bucket is loaded.
    """
    given = [*tensors]
    if len({tensor.is_cuda for tensor in given}) != 1:
        return "they are on several kinds of devices"
    if given[0].is_cuda:
        return ""
    largest = max(tensor.nbytes for tensor in given)
    # A bucket is at most as large as two of these. A process that writes to a full shared memory is killed.
    room = shutil.disk_usage(_SHARED_MEMORY).free if os.access(_SHARED_MEMORY, os.W_OK) else 0
    return "" if 4 * max(size, largest) < room else f"{_SHARED_MEMORY} has no room"


def handle(bucket: Pairs) -> str:
    """Return the handle of a bucket, in base64. It is good for one reader, and as long as the bucket exists.

    Tensors on the CPU are moved to shared memory: pass copies.
    """
    file = io.BytesIO()
    _Pickler(file).dump(bucket)
    return base64.b64encode(file.getvalue()).decode("ascii")


class _Pickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(obj)
            # Devices have other numbers in other processes. SGLang looks for the UUID.
            uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
            return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            # By name: torch's other way passes open files, to processes that know a secret of this one.
            storage: Any = obj
            arguments = (type(obj), *storage._share_filename_cpu_())
            # The reader releases what it has read.
            storage._shared_incref()
            return reductions.rebuild_storage_filename, arguments
        return NotImplemented
