"""`quick_head`: the head's matrix product by oneDNN, which reads the weights of a vocabulary once for a few rows.

On a CPU PyTorch has MKL do products in float32. For the handful of rows of a decoding step that took 1.2 to 3 times as
long (two rows: as long as one by one), and the head is most of a step of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

#: Elements of a weight below which changing libraries costs more than it saves, and rows above which it saves nothing
#: that is worth a copy of the logits.
_LARGE, _FEW = 2**21, 64


@contextmanager
def quick_head(base: Any) -> Iterator[None]:
    """Inside, the output embedding of the transformers model `base` is computed by oneDNN where that may pay."""
    head = base.get_output_embeddings()
    if not _may_pay(head):
        yield
        return

    def forward(hidden: Tensor) -> Tensor:
        if hidden.shape[:-1].numel() > _FEW:
            return linear(hidden, head.weight, head.bias)
        return linear(hidden.to_mkldnn(), head.weight, head.bias).to_dense()

    # Whatever the model and its hooks do around the head they go on doing.
    vars(head)["forward"] = forward
    try:
        yield
    finally:
        del vars(head)["forward"]


def _may_pay(head: Any) -> bool:
    """Only a plain product in float32 on a CPU: quantised layers, adapters and offloaded weights are left alone."""
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or "forward" in vars(head):
        return False
    weight, libraries = head.weight, (torch.backends.mkl, torch.backends.mkldnn)
    return (
        all(library.is_available() for library in libraries)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= _LARGE
        and not torch.is_autocast_enabled("cpu")
    )
