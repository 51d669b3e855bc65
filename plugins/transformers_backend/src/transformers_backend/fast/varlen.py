"""Attention of many segments of a pack in one call, instead of one call for each of them.

Two kernels can do that, both for short floats on GPUs: PyTorch's own `varlen_attn`, and FlashAttention where
transformers runs the model with it. Both take the segments' queries one after another, their keys likewise, and the
places where each segment begins. A segment's queries are the last of its keys, so segments that follow a common start
have more keys than queries.

PyTorch's has run on an H100 (docs/verified.md), FlashAttention's on no GPU.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from transformers_backend.fast.segments import VarlenCall

_log = logging.getLogger(__name__)

#: How far a kernel's largest error may be from the reference, as a share of the largest value: short floats stay within
#: a fifth of it, and a key too many or too few is more than it.
_NEAR = 0.05
#: Numbers of queries and keys with which a kernel is tried: short ones, and one of several of the kernel's blocks.
_TRIED = ((3, 3), (2, 5), (1, 9), (70, 200))
#: The window that is tried for a layer that has one.
_TRIED_WINDOW = 4

#: What `torch.nn.attention.varlen.varlen_attn` is. See `reference`.
Kernel = Callable[..., Any]


class JointAttention(Protocol):
    """Lets the segments of a call attend together."""

    def fits(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, window: int | None, **kwargs: Any) -> bool:
        """Return whether it can do what transformers asks for; the arguments are those of its attention."""

    def __call__(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, window: int | None, **kwargs: Any
    ) -> Tensor:
        """Return ``[1, queries, heads, size]``.

        Args:
            layer: transformers' attention layer.
            query, key, value: what ``call.of`` returned.
            call: the segments.
            window: the width of a sliding window.
            kwargs: what transformers passes to its attention.
        """


# PyTorch's kernel -----------------------------------------------------------------------------------------------------


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.attention.varlen.varlen_attn` in plain PyTorch, on any device and in any dtype.

    The last query of a sequence stands at its last key.

    Args:
        query: ``[all queries, heads, size]``.
        key, value: ``[all keys, heads of keys, size]``.
        cu_seq_q, cu_seq_k: int32[sequences + 1], where each begins, and where the last ends.
        max_q, max_k: at least the longest of them; a kernel looks no further.
        scale: None for one over the root of `size`.
        window_size: how many keys before and after its own a query sees, -1 for all. ``(-1, 0)`` is causal.
        enable_gqa: whether there are fewer heads of keys than of queries.

    Returns:
        ``[all queries, heads, size]``.

    Raises:
        ValueError: the numbers contradict each other: a kernel would read past its inputs or skip some.
    """
    left, right = window_size
    ends = (len(query), len(key))
    outputs = []
    for starts, longest, end in ((cu_seq_q, max_q, ends[0]), (cu_seq_k, max_k, ends[1])):
        bounds = starts.tolist()
        if starts.dtype != torch.int32 or bounds[0] != 0 or bounds[-1] != end or int(starts.diff().max()) > longest:
            raise ValueError(f"sequences begin at {starts}, of {end} tokens with at most {longest} in each")
    for (q, q_end), (k, k_end) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        places, seen = torch.arange(k_end - k - (q_end - q), k_end - k)[:, None], torch.arange(k_end - k)
        allowed = torch.ones(q_end - q, k_end - k, dtype=torch.bool)
        if left >= 0:
            allowed &= places - seen <= left
        if right >= 0:
            allowed &= seen - places <= right
        own, keys, values = (part.transpose(0, 1)[None] for part in (query[q:q_end], key[k:k_end], value[k:k_end]))
        mask = allowed.to(query.device)
        out = scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


class TorchVarlen:
    """Attends with PyTorch's kernel, once that has agreed with `reference` on heads like the caller's.

    Args:
        kernel: the kernel.
        dtypes: those that it takes.
    """

    def __init__(
        self, kernel: Kernel, dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16})
    ) -> None:
        self._kernel = kernel
        self._dtypes = dtypes
        self._trials: dict[tuple[Any, ...], bool] = {}

    def fits(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, window: int | None, **kwargs: Any) -> bool:
        dtype, size = _dtype(query), query.shape[-1]
        # transformers' own SDPA refuses a cap, and knows no sinks.
        others = (kwargs.get("dropout"), kwargs.get("softcap"), kwargs.get("s_aux"), kwargs.get("position_bias"))
        if any(each is not None and each != 0.0 for each in others[:2]) or any(each is not None for each in others[2:]):
            return False
        if dtype not in self._dtypes or size % 8 or size > 256 or {key.shape[-1], value.shape[-1]} != {size}:
            return False
        heads, grad = (query.shape[1], key.shape[1], size), torch.is_grad_enabled()
        name = (query.device, dtype, heads, window is None, kwargs.get("scaling"), grad)
        if name not in self._trials:
            width = None if window is None else _TRIED_WINDOW
            self._trials[name] = _agrees(self._kernel, query.device, dtype, heads, width, kwargs.get("scaling"), grad)
        return self._trials[name]

    def __call__(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, window: int | None, **kwargs: Any
    ) -> Tensor:
        dtype = _dtype(query)
        parts = [part[0].transpose(0, 1).to(dtype) for part in (query, key, value)]
        out: Tensor = self._kernel(
            *parts,
            call.cu_seq_q,
            call.cu_seq_k,
            call.max_q,
            call.max_k,
            scale=kwargs.get("scaling"),
            window_size=_causal(window),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[None]


def torch_varlen(device: torch.device) -> TorchVarlen | None:
    """Return PyTorch's own `varlen_attn` where this PyTorch has it and the device can run it; None elsewhere."""
    # On AMD's GPUs the kernel is another one, without windows.
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    known: Mapping[str, Any] = {}
    with suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= known.keys():
        # The first version had no windows.
        _log.warning(
            "attention of several rows at once is not used, so packed rows take longer: torch %s has no "
            "torch.nn.attention.varlen.varlen_attn that takes scale and window_size",
            torch.__version__,
        )
        return None
    return TorchVarlen(varlen_attn if "enable_gqa" in known else _sharing_unasked(varlen_attn))


def _sharing_unasked(kernel: Kernel) -> Kernel:
    """Wrap `varlen_attn` of PyTorch 2.11 or older, which takes no `enable_gqa`: its heads share keys in any case."""

    def run(*args: Any, enable_gqa: bool, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)

    return run


def _dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which PyTorch's own attention would compute: autocast casts what it is given."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _causal(window: int | None) -> tuple[int, int]:
    """Return a window of transformers, which counts the token itself, as a kernel counts it."""
    return (-1 if window is None else window - 1, 0)


def _agrees(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: int | None,
    scale: float | None,
    grad: bool,
) -> bool:
    """Return whether a kernel and `reference` in float32 give the same on random numbers, with `grad` backwards too.

    Args:
        heads: how many heads of queries and of keys there are, and their size.
    """
    (queries, keys, size), (longest_q, longest_k) = heads, map(max, zip(*_TRIED, strict=True))
    generator = torch.Generator().manual_seed(0)
    starts = [
        torch.tensor([*accumulate(each, initial=0)], dtype=torch.int32, device=device)
        for each in zip(*_TRIED, strict=True)
    ]
    shapes = [(int(starts[0][-1]), queries, size), *2 * [(int(starts[1][-1]), keys, size)]]
    given = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    upstream = torch.randn(shapes[0], generator=generator).to(device, dtype)

    def run(function: Kernel, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_(grad) for each in given]
        options = {"scale": scale, "window_size": _causal(window), "enable_gqa": queries != keys}
        out = function(*leaves, *starts, longest_q, longest_k, **options)
        return [out.detach(), *(torch.autograd.grad(out, leaves, upstream.to(dtype)) if grad else ())]

    with torch.inference_mode(False), torch.set_grad_enabled(grad), torch.autocast(device.type, enabled=False):
        try:
            found = run(kernel, dtype)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            _log.info("attention of several rows at once is not used: %s: %s", type(error).__name__, error)
            return False
        pairs = zip(found, run(reference, torch.float32), strict=True)
        apart = max(float((some.float() - other).abs().max() / other.abs().max()) for some, other in pairs)
    if not apart <= _NEAR:
        _log.warning("attention of several rows at once is not used: it is off by %.2g", apart)
    return apart <= _NEAR


# FlashAttention -------------------------------------------------------------------------------------------------------


class TransformersFlash:
    """Attends with FlashAttention, as transformers itself does for packed rows: windows, caps and sinks included.

    Args:
        name: what transformers calls it.
    """

    def __init__(self, name: str) -> None:
        from transformers import AttentionInterface

        self._name = name
        self._attend = AttentionInterface()[name]

    def fits(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, window: int | None, **kwargs: Any) -> bool:
        return True

    def __call__(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, window: int | None, **kwargs: Any
    ) -> Tensor:
        config = layer.config
        before = config._attn_implementation_internal
        # transformers looks there for the kernel to load.
        config._attn_implementation_internal = self._name
        try:
            out: Tensor = self._attend(
                layer,
                query,
                key,
                value,
                None,
                **kwargs,
                cu_seq_lens_q=call.cu_seq_q,
                cu_seq_lens_k=call.cu_seq_k,
                max_length_q=call.max_q,
                max_length_k=call.max_k,
            )[0]
        finally:
            config._attn_implementation_internal = before
        return out
