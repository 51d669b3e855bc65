"""Matrix products in float32 by oneDNN. PyTorch uses MKL for them on a CPU.

MKL's code for AVX-512 is for Intel's CPUs. On one of AMD it takes twice as long as oneDNN for 16 rows and more, and 1.5
times for one. With AVX2, it takes up to 2.3 times as long for the few rows of a decoding step, which reads each matrix
once, and a tenth longer for a thousand rows. oneDNN takes longer to begin each product.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from corelm_engine_kit import cpu_vendor

_log = logging.getLogger(__name__)

#: Where oneDNN is quicker, it is for one row of so many weights. Smaller layers than `_SMALL` are not looked at.
_LARGE, _SMALL = 2**19, 2**16
#: From how many products of a weight and a row on oneDNN is quicker, by what the CPU has.
_MANY = {"AVX2": 2**25, "AVX512": 2**22}


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``rows · weightᵀ + bias`` by oneDNN, in new memory and without gradients. Ask `is_quicker` first.

    Args:
        rows: float32[..., n].
        weight: float32[m, n].
        bias: float32[m].
    """
    # The operator reads the memory of a bias as if it lay together. PyTorch's own compiler calls it.
    bias = None if bias is None else bias.contiguous()
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return made


def is_quicker(weight: Tensor) -> bool:
    """Return whether products with this matrix would be made by MKL, and oneDNN is there and makes them sooner."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    return plain and _pays_from() < math.inf and _is_there()


@contextmanager
def quick_products(model: nn.Module) -> Iterator[None]:
    """Compute the linear layers of `model` by oneDNN inside, where that may pay and no gradients are wanted."""
    replaced = []
    if _pays_from() < math.inf and not (torch.is_autocast_enabled("cpu") or torch.is_grad_enabled()):
        for part in model.modules():
            # Quantized layers, adapters and offloaded weights are something else.
            if type(part) is not nn.Linear or type(part.weight) is not nn.Parameter or "forward" in vars(part):
                continue
            if part.weight.numel() >= _SMALL and is_quicker(part.weight):
                # Only the layer's own forward is replaced, so what the model and hooks do around it stays in force.
                # Not a closure: a copy of the model that is made meanwhile would compute with these weights.
                replaced.append((vars(part), partial(_forward, part)))
    for own, forward in replaced:
        own["forward"] = forward
    try:
        yield
    finally:
        for own, forward in replaced:
            # Another thread may have been here with the same model.
            if own.get("forward") is forward:
                del own["forward"]


def _forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
    # The weights are read here, because an update may replace them between two steps.
    weight, bias = layer.weight, layer.bias
    size = weight.numel()
    pays = size >= _LARGE or size * hidden.shape[:-1].numel() >= _pays_from()
    if pays and hidden.dtype == torch.float32 and is_quicker(weight) and not torch.is_grad_enabled():
        return product(hidden, weight, bias)
    return linear(hidden, weight, bias)


@cache
def _is_there() -> bool:
    """Return whether products would be made by MKL, and oneDNN's operator gives their numbers on small integers, which
    both sum exactly. It is not public.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    rows, weight, bias = (torch.arange(n, device="cpu").float() % 7 for n in (3 * 2 * 8, 5 * 8, 5))
    rows, weight = rows.view(3, 2, 8)[:, -1:], weight.view(5, 8)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            right = all(torch.equal(product(rows, weight, b), linear(rows, weight, b)) for b in (bias, None))
    except Exception:
        right = False
    if not right:
        _log.warning(
            "matrix products are left to MKL, and decoding a few rows takes up to twice as long, because torch %s has "
            "no torch.ops.mkldnn._linear_pointwise as 2.13 has it",
            torch.__version__,
        )
    return right


@cache
def _pays_from() -> float:
    """Return from how many products of a weight and a row on oneDNN is quicker on this CPU; infinity if it is not.

    Neither is timed: the processes of one machine are to compute the same numbers.
    """
    kind = torch.backends.cpu.get_cpu_capability()
    if kind == "AVX512" and cpu_vendor() == "GenuineIntel":
        return math.inf
    return _MANY.get(kind, math.inf)
