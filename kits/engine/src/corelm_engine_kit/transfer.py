"""`to_device`: copy what a forward pass needs to a GPU, without waiting for the pass that it is still computing."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`.

    A copy from ordinary memory to a GPU waits until the GPU has done all that was asked of it before, and then the GPU
    waits for the next pass to be prepared. A copy from pinned memory takes its turn among the kernels instead. PyTorch
    keeps the pinned memory until the copy is made.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
