"""Replacement for SGLang's kernels, which are built for GPUs only. For tests on a CPU; not part of the plugin.

With ``--attention-backend torch_native`` and ``--sampling-backend pytorch`` the server calls only the two kernels
below, the second only if it honours seeds. It imports many other names without calling them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Assign the slots of `out_cache_loc`, in order, to positions ``[start, end)`` of each request.

    Args:
        req_pool_indices: int[rows], the row of `req_to_token` that each request writes to.
        req_to_token: int[requests, positions], written in place.
        start_offset: int[rows], the first position of each request.
        end_offset: int[rows], the position after its last.
        out_cache_loc: int[slots].
        pool_len: the width of `req_to_token`; not needed here.
    """
    counts = (end_offset - start_offset).to(torch.int64)
    rows = torch.repeat_interleave(req_pool_indices.to(torch.int64), counts)
    # The position of each slot: the start of its request, plus its place among the request's slots.
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))[:-1]
    columns = torch.arange(len(rows)) + torch.repeat_interleave(start_offset.to(torch.int64) - first, counts)
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Return MurmurHash3 (A. Appleby, public domain) with seed 0, uint32[rows, columns].

    The hashed words are the low and the high half of ``seed[rows]``, ``positions[rows]`` and ``col_indices[columns]``.
    """
    seed = seed.view(torch.int64)[:, None]
    hashed = torch.zeros_like(seed)
    for word in (seed, seed >> 32, positions.to(torch.int64)[:, None], col_indices.to(torch.int64)[None, :]):
        hashed = hashed ^ _u32(_rotate_left(_u32(_u32(word) * 0xCC9E2D51), 15) * 0x1B873593)
        hashed = _u32(_rotate_left(hashed, 13) * 5 + 0xE6546B64)
    # The length of the input in bytes: four words.
    hashed = hashed ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = _u32((hashed ^ (hashed >> shift)) * factor)
    return hashed.to(torch.uint32)


def _u32(x: Tensor) -> Tensor:
    return x & 0xFFFFFFFF


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return _u32((x << bits) | (x >> (32 - bits)))


_OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")
_OPERATORS.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_OPERATORS.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CompositeExplicitAutograd")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no replacement on a CPU")

    return kernel
