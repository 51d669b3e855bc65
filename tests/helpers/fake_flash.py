"""FlashAttention 3 in plain PyTorch: what transformers imports of `flash_attn_interface`, with the same arguments.

The package runs on GPUs only. Its functions are imitated, so that transformers' own way to call them can be tested.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

#: transformers keeps the functions that it has imported, so all tests share this list.
SEEN: list[int] = []


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Any, softcap: float, sinks: Any
) -> Tensor:
    """Attend in one sequence, ``[tokens, heads, size]``; its last query stands at its last key."""
    groups = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    left, right = window
    right = 0 if causal else right
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    hidden |= behind > left if left >= 0 else hidden
    hidden |= behind < -right if right >= 0 else hidden
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    rows = zip(q, k, v, strict=True)
    return torch.stack([_attend(*row, softmax_scale, causal, window_size, softcap, s_aux) for row in rows])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    for starts, longest, total in ((cu_seqlens_q, max_seqlen_q, len(q)), (cu_seqlens_k, max_seqlen_k, len(k))):
        assert starts.dtype == torch.int32 and int(starts[-1]) == total and int(starts.diff().max()) <= longest
    SEEN.append(len(cu_seqlens_q) - 1)
    ends = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    return torch.cat(
        [
            _attend(
                q[slice(*own)], k[slice(*seen)], v[slice(*seen)], softmax_scale, causal, window_size, softcap, s_aux
            )
            for own, seen in ends
        ]
    )


@contextmanager
def fake_flash_attention() -> Iterator[list[int]]:
    """Let transformers import the imitation inside. Yields a list of how many sequences each call for many had."""
    name = "flash_attn_interface"
    before, fake = sys.modules.get(name), ModuleType(name)
    vars(fake).update(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=None
    )
    sys.modules[name] = fake
    SEEN.clear()
    try:
        yield SEEN
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
