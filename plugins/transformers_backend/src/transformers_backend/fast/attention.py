"""Attention over rows that lie one after another in one row: each segment of it sees only what belongs to its own row.

A segment is a run of tokens that attend to one another and to the tokens before them in their row, which may lie
elsewhere in the pack: the answers to one prompt share the prompt's keys and values. transformers lets another function
replace its attention (`AttentionInterface`); the one here hands every segment to transformers' own, or many of them at
once to PyTorch's `varlen_attn`. That takes short floats on GPUs, and has run on an H100 (docs/verified.md).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from corelm_engine_kit.transfer import to_device
from transformers_backend.engine import runs_layers_again

_log = logging.getLogger(__name__)

#: The name under which the attention is registered with transformers.
_NAME = "corelm_segments"
#: How far a kernel's largest error may be from transformers' own attention, as a share of the largest value: short
#: floats stay within a fifth of it, and a key too many or too few is more than it.
_NEAR = 0.05
#: Numbers of queries and keys with which a kernel is tried: short ones, and one of several of the kernel's blocks. And
#: the window that is tried for a layer that has one.
_TRIED, _TRIED_WINDOW = ((3, 3), (2, 5), (1, 9), (70, 200)), 4
#: Keys that are gathered for one call. A long start that many rows share would otherwise be copied for all of them at
#: once; keys and values of 8 heads of 128 bfloat16 take 512 MiB.
_KEYS = 2**17


@dataclass(frozen=True, eq=False)
class PackedSegment:
    """Tokens ``start <= t < stop`` of a pack.

    Attributes:
        keys: int64[k], where the tokens of its row are in the pack, up to its last one; None if it begins with its own.
    """

    start: int
    stop: int
    keys: Tensor | None = None


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """Segments that attend in one call.

    Attributes:
        start, stop: their tokens in the pack.
        keys: int64[k], where their keys are in the pack, segment by segment; None if those are their own tokens.
        cu_seq_q, cu_seq_k: int32[segments + 1], where the queries and keys of each begin, and where the last ones end.
        max_q, max_k: the largest number of queries and keys of a segment.
    """

    start: int
    stop: int
    keys: Tensor | None
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int

    def to(self, device: torch.device) -> VarlenCall:
        keys = None if self.keys is None else to_device(self.keys, device)
        starts_q, starts_k = (to_device(starts, device) for starts in (self.cu_seq_q, self.cu_seq_k))
        return replace(self, keys=keys, cu_seq_q=starts_q, cu_seq_k=starts_k)

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts that these segments need of ``[1, heads, total, size]``."""
        own = slice(self.start, self.stop)
        keys, values = (
            part[:, :, own] if self.keys is None else part.index_select(2, self.keys) for part in (key, value)
        )
        return query[:, :, own], keys, values


def varlen_calls(segments: Sequence[PackedSegment], max_keys: int = _KEYS) -> Iterator[VarlenCall]:
    """Yield the segments of a pack, in order, with at most `max_keys` keys in a call, or one segment that has more."""
    some: list[PackedSegment] = []
    keys = 0
    for segment in segments:
        own = segment.stop - segment.start if segment.keys is None else len(segment.keys)
        if some and keys + own > max_keys:
            yield _call(some)
            some, keys = [], 0
        some.append(segment)
        keys += own
    if some:
        yield _call(some)


def _call(segments: Sequence[PackedSegment]) -> VarlenCall:
    keys = [torch.arange(each.start, each.stop) if each.keys is None else each.keys for each in segments]
    counts = [each.stop - each.start for each in segments], [len(each) for each in keys]
    gathered = None if all(each.keys is None for each in segments) else torch.cat(keys)
    starts_q, starts_k = (torch.tensor([*accumulate(each, initial=0)], dtype=torch.int32) for each in counts)
    return VarlenCall(segments[0].start, segments[-1].stop, gathered, starts_q, starts_k, *map(max, counts))


# PyTorch's kernel ---------------------------------------------------------------------------------------------------


class VarlenAttention:
    """Lets many segments attend in one call, once it has agreed with transformers' own attention on heads like the
    caller's. A segment's queries are the last of its keys, so segments that follow a common start have more keys than
    queries.

    `kernel` is `torch.nn.attention.varlen.varlen_attn`, and takes `dtypes`.
    """

    def __init__(
        self, kernel: Callable[..., Any], dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16})
    ) -> None:
        self._kernel = kernel
        self._dtypes = dtypes
        self._trials: dict[tuple[Any, ...], bool] = {}

    def fits(
        self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, window: int | None, **kwargs: Any
    ) -> bool:
        """Return whether it can do what transformers asks for, and gives what `attend`, transformers' own attention,
        gives; the other arguments are those of `attend`.
        """
        # transformers' own SDPA refuses a cap, and knows no sinks.
        odd = kwargs.get("dropout") or kwargs.get("softcap") or kwargs.get("s_aux") is not None
        dtype, size = _dtype(query), query.shape[-1]
        if odd or dtype not in self._dtypes or size % 8 or size > 256 or {key.shape[-1], value.shape[-1]} != {size}:
            return False
        heads, grad = (query.shape[1], key.shape[1], size), torch.is_grad_enabled()
        name = (query.device, dtype, heads, window is None, kwargs.get("scaling"), grad)
        if name not in self._trials:
            self._trials[name] = self._agrees(attend, layer, query, heads, window, kwargs)
        return self._trials[name]

    def _agrees(
        self, attend: Any, layer: Any, query: Tensor, heads: tuple[int, ...], window: int | None, kwargs: dict[str, Any]
    ) -> bool:
        """Return whether it gives what `attend` gives in float32 on random numbers, also backwards if gradients are on.

        `heads` says how many heads of queries and of keys there are, and their size.
        """
        device, dtype, grad = query.device, _dtype(query), torch.is_grad_enabled()
        window = None if window is None else _TRIED_WINDOW
        segments, queries, keys = list[PackedSegment](), 0, 0
        for own, all_ in _TRIED:
            segments.append(PackedSegment(queries, queries + own, torch.arange(keys, keys + all_)))
            queries, keys = queries + own, keys + all_
        call, one_by_one = _call(segments).to(device), _SegmentAttention(segments, attend, None)
        (of_queries, of_keys, size), generator = heads, torch.Generator().manual_seed(0)
        shapes = [(1, of_queries, queries, size), *[(1, of_keys, keys, size)] * 2]
        given = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        upstream = torch.randn(1, queries, of_queries, size, generator=generator).to(device, dtype)

        def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
            leaves = [each.to(dtype).requires_grad_(grad) for each in given]
            out = function(*leaves)
            return [out.detach(), *(torch.autograd.grad(out, leaves, upstream.to(dtype)) if grad else ())]

        with torch.inference_mode(False), torch.set_grad_enabled(grad), torch.autocast(device.type, enabled=False):
            try:
                found = run(lambda *parts: self(*call.of(*parts), call, window, **kwargs), dtype)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:
                _log.info("attention of several rows at once is not used: %s: %s", type(error).__name__, error)
                return False
            mask = torch.tensor(window or 0)
            wanted = run(lambda q, k, v: one_by_one(layer, q, k, v, mask, **kwargs)[0], torch.float32)
            pairs = zip(found, wanted, strict=True)
            apart = max(float((some.float() - other).abs().max() / other.abs().max()) for some, other in pairs)
        if not apart <= _NEAR:
            _log.warning("attention of several rows at once is not used: it is off by %.2g", apart)
        return apart <= _NEAR

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, window: int | None, **kwargs: Any
    ) -> Tensor:
        """Return ``[1, queries, heads, size]`` for what ``call.of`` returned and transformers passes to its attention;
        `window` is the width of a sliding window.
        """
        dtype = _dtype(query)
        parts = [part[0].transpose(0, 1).to(dtype) for part in (query, key, value)]
        out: Tensor = self._kernel(
            *parts,
            call.cu_seq_q,
            call.cu_seq_k,
            call.max_q,
            call.max_k,
            scale=kwargs.get("scaling"),
            # transformers counts the token itself.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[None]


def torch_varlen(device: torch.device) -> VarlenAttention | None:
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
        lacks = "no torch.nn.attention.varlen.varlen_attn that takes scale and window_size, so packed rows take longer"
        _log.warning("attention of several rows at once is not used: torch %s has %s", torch.__version__, lacks)
        return None
    if "enable_gqa" in known:
        return VarlenAttention(varlen_attn)
    # In PyTorch 2.11 or older, heads share keys in any case.
    return VarlenAttention(lambda *args, enable_gqa, **kwargs: varlen_attn(*args, **kwargs))


def _dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which PyTorch's own attention would compute: autocast casts what it is given."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


# In the place of transformers' attention ----------------------------------------------------------------------------


class CannotPack(Exception):
    """The model's attention cannot run per segment."""


class _SegmentAttention:
    """Runs the segments of one pack with transformers' own attention, or with `joint` where that fits."""

    def __init__(self, segments: Sequence[PackedSegment], attend: Any, joint: VarlenAttention | None) -> None:
        self._segments = segments
        self._attend = attend
        self._joint = joint
        # Every layer needs the same few masks, and the same places of segments.
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._calls: dict[tuple[torch.device, bool], list[VarlenCall]] = {}

    def __call__(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend as transformers asks for it: query ``[1, heads, total, size]``; `attention_mask` is what `_mask`
        returned.
        """
        mask = attention_mask
        if (mask is not None and mask.ndim) or kwargs.get("position_bias") is not None or query.shape[0] != 1:
            raise CannotPack("the model adds a mask or a bias to its attention")
        if not getattr(layer, "is_causal", True) or kwargs.get("is_causal") is False:
            raise CannotPack("the model's attention is not causal")
        window = int(mask) if mask is not None and int(mask) else None
        joint = self._joint
        if joint is not None and not joint.fits(self._attend, layer, query, key, value, window, **kwargs):
            joint = None
        name = (query.device, joint is not None)
        if name not in self._calls:
            calls = varlen_calls(self._segments, 0 if joint is None else _KEYS)
            self._calls[name] = [call.to(query.device) for call in calls]
        outputs = []
        for call in self._calls[name]:
            parts = call.of(query, key, value)
            if joint is not None:
                outputs.append(joint(*parts, call, window, **kwargs))
            else:
                allowed = self._allowed(parts[0].shape[2], parts[1].shape[2], window, query.device)
                outputs.append(self._attend(layer, *parts, allowed, **kwargs)[0])
        # A copy of a long row's only output would be kept for gradients.
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None

    def _allowed(self, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return what `_visible` returns; None if plain causal attention does the same."""
        if queries == keys and (window is None or keys <= window):
            return None
        name = (queries, keys, window, device)
        if name not in self._masks:
            self._masks[name] = _visible(*name)
        return self._masks[name]


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool[1, 1, queries, keys]: which positions see which, where the queries are the last of the positions."""
    seeing, seen = torch.arange(keys - queries, keys, device=device)[:, None], torch.arange(keys, device=device)
    allowed = seen <= seeing
    return (allowed if window is None else allowed & (seeing - seen < window))[None, None]


def _mask(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> Tensor:
    """Return what transformers passes to the attention instead of a mask: the width of a sliding window, or 0.

    Any other attention refuses such a mask, so a layer that runs again later fails instead of being silently wrong.
    """
    if use_vmap:
        raise CannotPack("the model makes a mask that is not one of transformers' usual ones")
    return torch.tensor(local_size or 0)


_CURRENT: ContextVar[_SegmentAttention | None] = ContextVar("corelm_segments", default=None)


def _attention(*args: Any, **kwargs: Any) -> Any:
    current = _CURRENT.get()
    if current is None:
        raise RuntimeError(
            "this model is scoring in another thread, which has replaced its attention; call it again afterwards"
        )
    return current(*args, **kwargs)


@contextmanager
def attention_per_segment(
    base: Any, segments: Sequence[PackedSegment], joint: VarlenAttention | None = None
) -> Iterator[None]:
    """Let a model of transformers read one row of ``[1, total]`` ids as these segments inside; restore it afterwards.

    `joint` attends in many of them at once, where it fits; None for one after another.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    own = _implementation(base)
    found = {id(config): config for module in base.modules() if (config := getattr(module, "config", None)) is not None}
    # Only those that have the attribute: setting it on another object would change no attention.
    configs = [each for each in found.values() if getattr(each, "_attn_implementation_internal", None) == own]
    if not configs:
        raise CannotPack("the model's configuration has no attention that can be replaced")
    token = _CURRENT.set(_SegmentAttention(segments, AttentionInterface()[own], joint))
    try:
        for config in configs:
            config._attn_implementation_internal = _NAME
        yield
    finally:
        for config in configs:
            config._attn_implementation_internal = own
        _CURRENT.reset(token)


def _implementation(base: Any) -> str:
    name: str = base.config.get_text_config()._attn_implementation
    return name


def may_pack(base: Any) -> bool:
    """Return whether the model's attention may be replaced by this one, and no layer will run again later."""
    # The mask of chunked attention looks like that of a window here.
    chunked = getattr(base.config.get_text_config(), "attention_chunk_size", None)
    runs_again = torch.is_grad_enabled() and runs_layers_again(base)
    return _implementation(base) == "sdpa" and not chunked and not runs_again
