"""Kernels that reduce a tile of logits on a GPU, where every pass over a tile costs a good part of its matrix product.

They are for heads without a bias and without a cap, and used where Triton is installed and they agree with float64 on
this device. All others, and every head on a CPU, are reduced in `tiles`.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

#: Set to 0 to leave out the kernels of `triton_head`.
VARIABLE = "CORELM_TRITON_HEAD"
#: How far the kernels may be from plain PyTorch: in log-probs, and in gradients as a share of the largest.
_NEAR, _NEAR_GRADIENT = 1e-4, 0.02


class TileReduction(Protocol):
    """Reduces the product of hidden states and some of the head's rows.

    In all methods `product` is ``[rows, width]`` in the dtype of the head, and a logit is ``factor · product``;
    `columns` is int64[rows], the column of each row's token, which may lie outside the tile; other tensors are
    float32[rows].
    """

    def fold(
        self, product: Tensor, factor: float, columns: Tensor, largest: Tensor, total: Tensor, chosen: Tensor
    ) -> None:
        """Take a tile into what is known of its rows, in place.

        Args:
            largest, total: the exponentials so far sum to ``total · exp(largest)``.
            chosen: the logit of each row's token, if it was seen.
        """

    def gradient_(self, product: Tensor, factor: float, columns: Tensor, normalizer: Tensor, upstream: Tensor) -> None:
        """Overwrite `product` with ``upstream · (one-hot - softmax)``.

        Args:
            normalizer: the log of each row's sum of exponentials.
            upstream: the gradient of each log-prob, times the factor.
        """


@cache
def reduction_for(device: torch.device, dtype: torch.dtype) -> TileReduction | None:
    """Return how products of this dtype are reduced on a device; None for the plain passes."""
    # Nobody has run the kernels on an AMD GPU.
    if device.type != "cuda" or os.environ.get(VARIABLE) == "0" or dtype == torch.float64 or torch.version.hip:
        return None
    try:
        from transformers_backend.fast.triton_head import ByTriton
    except ImportError as error:
        _log.info("the head's kernels are not used, because Triton cannot be imported: %s", error)
        return None
    return ByTriton() if agrees(ByTriton(), device, dtype) else None


def agrees(kernels: TileReduction, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels and float64 give the same log-probs and gradients on random numbers, in two tiles."""
    rows, widths, factor = 5, (3000, 37), 0.7
    generator = torch.Generator().manual_seed(0)
    tiles = [(4 * torch.randn(rows, width, generator=generator)).to(device, dtype) for width in widths]
    tokens = torch.tensor([0, 2999, 3000, 3036, 1500], device=device)
    upstream = torch.tensor([1.0, -2.0, 0.5, 1.0, 0.0], device=device)
    logits = (torch.cat(tiles, 1).double() * factor).requires_grad_()
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        wanted = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        (gradient,) = torch.autograd.grad(wanted, logits, upstream.double())
        wanted = wanted.detach()
    total, chosen = torch.zeros(2, rows, device=device)
    largest = torch.full_like(total, torch.finfo(total.dtype).min)
    try:
        for tile, start in zip(tiles, (0, widths[0]), strict=True):
            kernels.fold(tile, factor, tokens - start, largest, total, chosen)
        normalizer = largest + total.log()
        apart = float((chosen - normalizer - wanted).abs().max())
        for tile, start in zip(tiles, (0, widths[0]), strict=True):
            kernels.gradient_(tile, factor, tokens - start, normalizer, upstream)
        share = float((torch.cat(tiles, 1) - gradient).abs().max() / gradient.abs().max())
        apart = max(apart, share * _NEAR / _NEAR_GRADIENT)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        # A compiler may fail in any way.
        _log.warning("the head's kernels are not used: %s: %s", type(error).__name__, error)
        return False
    if not apart <= _NEAR:
        _log.warning("the head's kernels are not used: they are off by %.2g", apart)
    return apart <= _NEAR
