"""`quick_head`: the head's matrix product by oneDNN, which reads the weights of a vocabulary once for a few rows.

On a CPU PyTorch uses MKL for products in float32. For the handful of rows of a decoding step MKL took 1.2 to 3 times as
long (two rows: as long as one after the other), and the head is most of a step of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

#: Below `_LARGE` weights, changing libraries costs more than it saves. Above `_FEW` rows it saves too little to pay for
#: the copy of the logits.
_LARGE, _FEW = 2**21, 64


@contextmanager
def quick_head(base: Any) -> Iterator[None]:
    """Compute the output embedding of the transformers model `base` with oneDNN inside, if that may pay."""
    head = base.get_output_embeddings()
    if not _may_pay(head):
        yield
        return

    def forward(hidden: Tensor) -> Tensor:
        if hidden.shape[:-1].numel() > _FEW:
            return linear(hidden, head.weight, head.bias)
        return few_rows_linear(hidden, head.weight, head.bias)

    # Only the head's own forward is replaced, so what the model and hooks do around it stays in force.
    vars(head)["forward"] = forward
    try:
        yield
    finally:
        del vars(head)["forward"]


def few_rows_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``rows · weightᵀ + bias`` by oneDNN, without gradients."""
    product: Tensor = linear(rows.to_mkldnn(), weight, bias).to_dense()
    return product


def is_quicker(tensor: Tensor) -> bool:
    """Return whether oneDNN is there for products with this tensor, and MKL would be used for them otherwise."""
    libraries = (torch.backends.mkl, torch.backends.mkldnn)
    return (
        all(library.is_available() for library in libraries)
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
    )


def _may_pay(head: Any) -> bool:
    """Return whether the head is a large, plain float32 product on a CPU.

    Quantized layers, adapters and offloaded weights are not.
    """
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or "forward" in vars(head):
        return False
    return is_quicker(head.weight) and head.weight.numel() >= _LARGE and not torch.is_autocast_enabled("cpu")
