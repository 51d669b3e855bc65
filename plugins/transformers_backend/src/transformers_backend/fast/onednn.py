"""`quick_products`: the matrix products of a decoding step by oneDNN, which reads a matrix once for a few rows.

On a CPU PyTorch uses MKL for products in float32. For the handful of rows of a decoding step MKL took up to 2.3 times
as long (two rows: as long as one after the other), and these products are most of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

#: Below `_LARGE` weights, changing libraries costs more than it saves. Above `_FEW` rows it saves too little.
_LARGE, _FEW = 2**20, 64

_Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@contextmanager
def quick_products(model: nn.Module) -> Iterator[None]:
    """Compute the linear layers of `model` with oneDNN inside, where that may pay."""
    replaced = [part for part in model.modules() if _may_pay(part)] if _is_possible() else []
    # Only the layer's own forward is replaced, so what the model and hooks do around it stays in force.
    for part in replaced:
        vars(part)["forward"] = _forward(part)
    try:
        yield
    finally:
        for part in replaced:
            del vars(part)["forward"]


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    product = _product()

    def forward(hidden: Tensor) -> Tensor:
        # The weights are read here, because an update may replace them between two steps.
        weight, bias = layer.weight, layer.bias
        few = hidden.shape[:-1].numel() <= _FEW and hidden.dtype == torch.float32 and not torch.is_grad_enabled()
        return product(hidden, weight, bias) if few else linear(hidden, weight, bias)

    return forward


@cache
def _product() -> _Product:
    """Return oneDNN's product of plain tensors; without that operator, one that copies what goes in and comes out."""
    return _direct if _is_right(_direct) else _copying


def _direct(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # PyTorch's own compiler calls this operator. It is not public, so it is tried first.
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(hidden, weight, bias, "none", [], "")
    return product


def _copying(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(hidden.to_mkldnn(), weight, bias).to_dense()


def _is_right(product: _Product) -> bool:
    """Return whether a product gives the numbers of PyTorch's on small integers, which both sum exactly."""
    hidden, weight, bias = (torch.arange(n, device="cpu").float() % 7 for n in (3 * 2 * 8, 5 * 8, 5))
    hidden, weight = hidden.view(3, 2, 8)[:, -1:], weight.view(5, 8)
    try:
        with torch.no_grad():
            return all(torch.equal(product(hidden, weight, b), linear(hidden, weight, b)) for b in (bias, None))
    except Exception:
        return False


def _is_possible() -> bool:
    libraries = (torch.backends.mkl, torch.backends.mkldnn)
    return all(library.is_available() for library in libraries) and not torch.is_autocast_enabled("cpu")


def _may_pay(part: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer is a large, plain float32 product on a CPU.

    Quantized layers, adapters and offloaded weights are not.
    """
    if type(part) is not nn.Linear or type(part.weight) is not nn.Parameter or "forward" in vars(part):
        return False
    weight = part.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= _LARGE
        and weight.is_contiguous()
    )
