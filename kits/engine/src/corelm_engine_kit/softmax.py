"""`Workspace`: the softmax of wide rows, a few rows at a time, in memory that is kept from step to step.

On a CPU, fresh memory for eight rows of a large vocabulary costs more than their softmax, and a second pass over a row
is quick only while the row is in the core's cache. A GPU's allocator keeps its memory anyway, and a GPU reduces all
rows at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: How many entries are reduced at a time on a CPU: 512 KiB of float32, half of a core's cache.
_ENTRIES = 2**17

#: Given some rows of scores and their softmax, float32[n, K] each, returns ``[n, m]``.
Reduce = Callable[[Tensor, Tensor], Tensor]


class Workspace:
    """Memory of one caller, who is done with a result before asking for the next."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def softmax(self, scores: Tensor, reduce: Reduce, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the softmax of ``scores / temperature``, float32[rows, K], and what `reduce` makes of it.

        A row's numbers do not depend on the other rows.
        """
        if scores.device.type != "cpu":
            mass = (scores if temperature == 1.0 else scores / temperature).softmax(-1)
            return mass, reduce(scores, mass)
        mass = self._take("mass", scores, len(scores))
        reduced = [
            reduce(some, self._softmax(some, temperature, into))
            for some, into in zip(scores.split(_few(scores)), mass.split(_few(scores)), strict=True)
        ]
        return mass, torch.cat(reduced)

    def reduced(self, scores: Tensor, reduce: Reduce) -> Tensor:
        """Return what `reduce` makes of the softmax; the softmax itself is not kept."""
        if scores.device.type != "cpu":
            return reduce(scores, scores.softmax(-1))
        few = _few(scores)
        mass = self._take("mass", scores, min(few, len(scores)))
        return torch.cat([reduce(some, self._softmax(some, 1.0, mass[: len(some)])) for some in scores.split(few)])

    def _softmax(self, scores: Tensor, temperature: float, into: Tensor) -> Tensor:
        if temperature != 1.0:
            scores = torch.div(scores, temperature, out=self._take("scaled", scores, len(scores)))
        return torch.softmax(scores, -1, out=into)

    def _take(self, name: str, like: Tensor, rows: int) -> Tensor:
        """Return ``[rows, K]`` of the memory with this name; it may hold anything."""
        memory, needed = self._memory.get(name), rows * like.shape[-1]
        if memory is None or memory.dtype != like.dtype or memory.numel() < needed:
            memory = self._memory[name] = torch.empty(needed, dtype=like.dtype)
        return memory[:needed].view(rows, -1)


def _few(scores: Tensor) -> int:
    return max(1, _ENTRIES // scores.shape[-1])
