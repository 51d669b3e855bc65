"""Which tokens of a pack attend to which, and the same as the kernels want it that attend in many segments at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from corelm_engine_kit.transfer import to_device

#: Keys that are gathered for one call. A long start that many rows share would otherwise be copied for all of them at
#: once; keys and values of 8 heads of 128 bfloat16 take 512 MiB.
_KEYS = 2**17


@dataclass(frozen=True)
class PackedSegment:
    """Tokens ``start <= t < stop`` of a pack.

    Attributes:
        before: where the earlier tokens of the same row are, as ranges of the same kind.
    """

    start: int
    stop: int
    before: tuple[tuple[int, int], ...] = ()

    @property
    def keys(self) -> int:
        """How many tokens its last token attends to, itself included."""
        return self.stop - self.start + sum(stop - start for start, stop in self.before)


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
        own = segment.keys
        if some and keys + own > max_keys:
            yield _call(some)
            some, keys = [], 0
        some.append(segment)
        keys += own
    if some:
        yield _call(some)


def _call(segments: Sequence[PackedSegment]) -> VarlenCall:
    queries, keys = [each.stop - each.start for each in segments], [each.keys for each in segments]
    ranges = [(*each.before, (each.start, each.stop)) for each in segments]
    alone = not any(each.before for each in segments)
    gathered = None if alone else torch.cat([torch.arange(*some) for each in ranges for some in each])
    starts_q, starts_k = (torch.tensor([*accumulate(each, initial=0)], dtype=torch.int32) for each in (queries, keys))
    return VarlenCall(segments[0].start, segments[-1].stop, gathered, starts_q, starts_k, max(queries), max(keys))
