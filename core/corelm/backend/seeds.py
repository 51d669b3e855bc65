"""One seed per answer, derived from the seed of the call: `seeds_of_call` and `answer_seeds`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from corelm.backend import arguments
from corelm.backend.engine import OpenEngine
from corelm.spec.sampling import SamplingParams

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
    made = []
    for row in rows:
        of_row = _mix((stream + (row + 1) * gamma) & _MASK)
        made += [_mix((of_row + (sample + 1) * gamma) & _MASK) >> 1 for sample in range(samples)]
    return torch.tensor(made, dtype=torch.int64)


def continued_seeds(seeds: Tensor, lengths: Tensor) -> Tensor:
    """int64[answers]: seeds for answers that go on after so many tokens. With the old seed, an engine would draw the
    random numbers of the first tokens again. An answer without tokens keeps its seed.
    """
    gamma = 0x9E3779B97F4A7C15
    pairs = zip(seeds.tolist(), lengths.tolist(), strict=True)
    made = [_mix((seed + length * gamma) & _MASK) >> 1 if length else seed for seed, length in pairs]
    return torch.tensor(made, dtype=torch.int64)


def seeds_of_call(engine: OpenEngine, sampling: SamplingParams, rows: int, seeds: Any = None) -> Tensor | None:
    """Return int64[rows * samples], the seeds of a call's answers, or None to let the engine choose.

    None is returned for an engine that takes no seeds. It is also returned for an engine whose seeds are costly, unless
    the caller gave `seeds` or ``sampling.seed``.

    Args:
        rows: number of prompts.
        seeds: the caller's own seeds, one per answer; None derives them from ``sampling.seed`` or, if seeds are free,
            from torch's generator.

    Raises:
        CapabilityError: the caller gave a seed, and the engine does not honour seeds.
        InvalidRequestError: `seeds` are not one integer in [0, 2**63) per answer.
    """
    samples = sampling.num_samples or 1
    if not engine.capabilities.per_answer_seeds:
        if seeds is not None or (sampling.seed is not None and not sampling.greedy):
            engine.require("per_answer_seeds", "it does not honour seeds; leave the seed out")
        return None
    if seeds is not None:
        return arguments.seeds(seeds, rows * samples)
    if engine.capabilities.seeds_are_costly and (sampling.seed is None or sampling.greedy):
        return None
    if sampling.greedy:
        # Greedy decoding draws nothing, so torch's generator is left as it was.
        return answer_seeds(0, range(rows), samples)
    # Without a seed torch.manual_seed governs the answers, as it governs everything else that a torch user samples.
    seed = int(torch.randint(2**62, ())) if sampling.seed is None else sampling.seed
    return answer_seeds(seed, range(rows), samples)
