"""Attention over rows that lie one after another in one row: each segment of it sees only what belongs to its own row.

A segment is a run of tokens that attend to one another and to the tokens before them in their row, which may lie
elsewhere in the pack: the answers to one prompt share the prompt's keys and values. transformers lets another function
replace its attention (`AttentionInterface`); the one here hands every segment to transformers' own, or many of them at
once to a kernel (`varlen`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from transformers_backend.engine import runs_layers_again
from transformers_backend.fast.segments import PackedSegment, VarlenCall, varlen_calls
from transformers_backend.fast.varlen import JointAttention

#: The name under which the attention is registered with transformers.
_NAME = "corelm_segments"


class CannotPack(Exception):
    """The model's attention cannot run per segment."""


class _SegmentAttention:
    """Runs the segments of one pack.

    Args:
        segments: the segments.
        attend: transformers' own attention for one of them.
        joint: attends in many of them at once, where it fits; None for one after another.
    """

    def __init__(self, segments: Sequence[PackedSegment], attend: Any, joint: JointAttention | None) -> None:
        self._segments = segments
        self._attend = attend
        self._joint = joint
        # Every layer needs the same few masks, and the same places of segments.
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._calls: dict[torch.device, list[VarlenCall]] = {}

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
        if self._joint is not None and self._joint.fits(layer, query, key, value, window, **kwargs):
            return self._together(self._joint, layer, query, key, value, window, kwargs), None
        outputs = []
        for segment in self._segments:
            own = (segment.start, segment.stop)
            keys, values = (_gather(part, (*segment.before, own)) for part in (key, value))
            queries = query[:, :, segment.start : segment.stop]
            allowed = self._allowed(queries.shape[2], keys.shape[2], window, query.device)
            outputs.append(self._attend(layer, queries, keys, values, allowed, **kwargs)[0])
        # A copy of a long row's only output would be kept for gradients.
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None

    def _together(
        self,
        joint: JointAttention,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        calls = self._calls.get(query.device)
        if calls is None:
            calls = self._calls[query.device] = [call.to(query.device) for call in varlen_calls(self._segments)]
        outputs = [joint(layer, *call.of(query, key, value), call, window, **kwargs) for call in calls]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _allowed(self, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return bool[1, 1, queries, keys], where the queries are the last of the positions; None if plain causal
        attention does the same.
        """
        if queries == keys and (window is None or keys <= window):
            return None
        name = (queries, keys, window, device)
        if name not in self._masks:
            seeing, seen = torch.arange(keys - queries, keys, device=device)[:, None], torch.arange(keys, device=device)
            allowed = seen <= seeing
            self._masks[name] = (allowed if window is None else allowed & (seeing - seen < window))[None, None]
        return self._masks[name]


def _gather(part: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    pieces = [part[:, :, start:stop] for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


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
    base: Any, segments: Sequence[PackedSegment], joint: JointAttention | None = None
) -> Iterator[None]:
    """Let `base` read one row of ``[1, total]`` ids as these segments inside; restore it afterwards.

    Args:
        base: a transformers model.
        segments: the segments.
        joint: attends in many of them at once, where it fits; None for one after another.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    own = _implementation(base)
    # Only those that have the attribute: setting it on another object would change no attention.
    configs = [config for config in _configs(base) if getattr(config, "_attn_implementation_internal", None) == own]
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


def _configs(base: Any) -> list[Any]:
    """Return the distinct configurations that the model's parts look at."""
    found = {id(config): config for module in base.modules() if (config := getattr(module, "config", None)) is not None}
    return list(found.values())


def _implementation(base: Any) -> str:
    name: str = base.config.get_text_config()._attn_implementation
    return name


def may_pack(base: Any) -> str | None:
    """Return the attention that the model runs with, if it may be packed: no layer will run again later; else None."""
    # The mask of chunked attention looks like that of a window here.
    chunked = getattr(base.config.get_text_config(), "attention_chunk_size", None)
    runs_again = torch.is_grad_enabled() and runs_layers_again(base)
    return None if chunked or runs_again else _implementation(base)
