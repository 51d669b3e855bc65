"""Rows one after another in one row, without padding: attention then runs per segment, and a segment sees only its own.

A segment is a run of tokens that attend to one another and to what came before them, which may lie elsewhere in the
pack: the answers of one prompt share the prompt's keys and values. transformers lets another function stand in for its
attention (`AttentionInterface`); ours hands every segment to transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: What the attention is called while it is ours.
_NAME = "corelm_segments"


class CannotPack(Exception):
    """The model's attention is not one that can run per segment."""


@dataclass(frozen=True)
class Segment:
    """Tokens ``start <= t < stop`` of a pack. `before`: where the tokens are that precede them, as such ranges."""

    start: int
    stop: int
    before: tuple[tuple[int, int], ...] = ()


class _Attention:
    """Runs the segments of one pack. `layers`: how often it was called."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        from transformers import AttentionInterface

        self.layers = 0
        self._segments = segments
        self._attend = AttentionInterface()["sdpa"]
        # Every layer needs the same few.
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def __call__(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """As transformers calls it: query ``[1, heads, total, size]``; `mask` is what `_mask` made for such layers."""
        self.layers += 1
        if (mask is not None and mask.ndim) or kwargs.get("position_bias") is not None or query.shape[0] != 1:
            raise CannotPack("attention with a mask or a bias of the model's own")
        if not getattr(layer, "is_causal", True) or kwargs.get("is_causal") is False:
            raise CannotPack("attention that is not causal")
        window = int(mask) if mask is not None and int(mask) else None
        outputs = []
        for segment in self._segments:
            own = (segment.start, segment.stop)
            keys, values = (_gather(part, (*segment.before, own)) for part in (key, value))
            queries = query[:, :, segment.start : segment.stop]
            allowed = self._allowed(queries.shape[2], keys.shape[2], window, query.device)
            outputs.append(self._attend(layer, queries, keys, values, allowed, **kwargs)[0])
        return torch.cat(outputs, dim=1), None

    def _allowed(self, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """bool[1, 1, queries, keys]: the last `queries` of the positions look back; None where plain causality does."""
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
    """What transformers hands to the attention in place of a mask: the width of a sliding window, or 0.

    Any other attention refuses such a mask. So a layer that is run again later fails, and is not silently wrong.
    """
    if use_vmap:
        raise CannotPack("a mask of the model's own")
    return torch.tensor(local_size or 0)


_CURRENT: ContextVar[_Attention | None] = ContextVar("corelm_segments", default=None)


def _attention(*args: Any, **kwargs: Any) -> Any:
    current = _CURRENT.get()
    if current is None:
        raise RuntimeError("this model is being scored with in another thread; one call at a time")
    return current(*args, **kwargs)


@contextmanager
def attention_per_segment(base: Any, segments: Sequence[Segment]) -> Iterator[_Attention]:
    """Inside, `base` reads one row of ``[1, total]`` ids as these segments. Afterwards it is as it was."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    attention = _Attention(segments)
    configs = _configs(base)
    before = [config._attn_implementation_internal for config in configs]
    token = _CURRENT.set(attention)
    try:
        for config in configs:
            config._attn_implementation_internal = _NAME
        yield attention
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
        _CURRENT.reset(token)


def _configs(base: Any) -> list[Any]:
    """The distinct configurations that the model's parts look at."""
    found = {id(config): config for module in base.modules() if (config := getattr(module, "config", None)) is not None}
    return [config for config in found.values() if getattr(config, "_attn_implementation", None) == "sdpa"]


def may_pack(base: Any) -> bool:
    """Whether it is worth trying: the attention is transformers' SDPA, and nothing will call it again later."""
    text = base.config.get_text_config()
    # A chunk's mask looks to us like that of a window.
    chunked = getattr(text, "attention_chunk_size", None)
    return text._attn_implementation == "sdpa" and not chunked and not _runs_again_in_backward(base)


def _runs_again_in_backward(base: Any) -> bool:
    """Whether layers are checkpointed: they run again when the attention is no longer ours."""
    if not torch.is_grad_enabled():
        return False
    return any(
        hasattr(module, "_checkpoint_wrapped_module")
        or (module.training and getattr(module, "gradient_checkpointing", False))
        for module in base.modules()
    )
