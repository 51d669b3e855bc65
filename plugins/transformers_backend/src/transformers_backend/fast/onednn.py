"""Matrix products in float32 by oneDNN. PyTorch uses MKL for them on a CPU.

Which of them is quicker depends on the CPU, so both are timed once in a process. MKL takes twice as long on an AMD CPU
with AVX-512, for example, and with AVX2 up to 2.3 times as long for the few rows of a decoding step, which reads each
matrix once. oneDNN takes longer to begin each product, which small ones do not make up for.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_log = logging.getLogger(__name__)

#: Where oneDNN is quicker, it is for one row of so many weights. Smaller layers than `_SMALL` are not looked at.
_LARGE, _SMALL = 2**19, 2**16
#: What both libraries are timed with: so many matrices, larger than most caches together, of so many rows and columns;
#: the rows that each is multiplied with; and from how many products of a weight and a row on oneDNN is quicker if it is
#: with these.
_TIMED = ((32, 512, 16, 2**22), (8, 1024, 1, 2**25))
#: Two libraries that take about as long must not be told apart in one process and not in the next.
_CLEARLY = 0.9


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
    return plain and _pays_from() < math.inf


@contextmanager
def quick_products(model: nn.Module) -> Iterator[None]:
    """Compute the linear layers of `model` by oneDNN inside, where that may pay and no gradients are wanted."""
    replaced = []
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and not (torch.is_autocast_enabled("cpu") or torch.is_grad_enabled()) and _pays_from() < math.inf:
        for part in model.modules():
            # Quantized layers, adapters and offloaded weights are something else.
            if type(part) is not nn.Linear or type(part.weight) is not nn.Parameter or "forward" in vars(part):
                continue
            if part.weight.numel() >= _SMALL and is_quicker(part.weight):
                # Only the layer's own forward is replaced, so what the model and hooks do around it stays in force.
                replaced.append((vars(part), _QuickForward(part)))
    for own, forward in replaced:
        own["forward"] = forward
    try:
        yield
    finally:
        for own, forward in replaced:
            # Another thread may have been here with the same model.
            if own.get("forward") is forward:
                del own["forward"]


class _QuickForward:
    """The forward of a linear layer.

    An object, because a copy of the model that is made meanwhile has to have one of its own: copying a function copies
    nothing, and the layer's copy would compute with these weights.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, hidden: Tensor) -> Tensor:
        # The weights are read here, because an update may replace them between two steps.
        weight, bias = self._layer.weight, self._layer.bias
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
    """Return from how many products of a weight and a row on oneDNN is quicker here; infinity if it is not."""
    if not _is_there():
        return math.inf
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return next((least for *timed, least in _TIMED if _is_clearly_quicker(*timed)), math.inf)


def _is_clearly_quicker(count: int, size: int, n: int) -> bool:
    weights, rows = torch.ones(count, size, size, device="cpu"), torch.ones(n, size, device="cpu")
    mkl, onednn = list[float](), list[float]()
    for _ in range(4):
        for multiply, taken in ((linear, mkl), (product, onednn)):
            for weight in weights:
                start = time.perf_counter()
                multiply(rows, weight)
                taken.append(time.perf_counter() - start)
    return median(onednn) < _CLEARLY * median(mkl)
