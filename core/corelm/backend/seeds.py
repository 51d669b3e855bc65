"""One seed per answer, derived from the seed of the call."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195, fig. 19).

    Every output bit depends on every input bit, the low 32 that torch's CPU generator keeps among them.
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def answer_seeds(seed: int, rows: Iterable[int], samples: int = 1) -> Tensor:
    """int64[len(rows) * samples], each in [0, 2**63): one seed for sample s of row r, from (seed, r, s) and nothing
    else.

    So the other rows of a batch and the number of samples change no answer.

    >>> bool(answer_seeds(7, [0, 1], 2)[2] == answer_seeds(7, [1], 4)[0])
    True
    """
    gamma = 0x9E3779B97F4A7C15
    stream = _mix((seed + gamma) & _MASK)
    by_row = (_mix((stream + (row + 1) * gamma) & _MASK) for row in rows)
    return torch.tensor(
        [_mix((r + (s + 1) * gamma) & _MASK) >> 1 for r in by_row for s in range(samples)], dtype=torch.int64
    )
