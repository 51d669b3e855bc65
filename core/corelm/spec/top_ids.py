"""The most probable ids at a position, as engines report them: their log-probs, and the mass of all other ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TopIds:
    """The most probable ids at the positions of one row, the most probable first.

    Attributes:
        ids: int64[positions, k]; -1 where fewer than k ids have a probability.
        logprobs: float32[positions, k]; -inf where the id is -1.
        tail: float32[positions]: the log of the probability that all other ids have together.
    """

    ids: Tensor
    logprobs: Tensor
    tail: Tensor

    @classmethod
    def of(cls, found: Sequence[Mapping[int, float]], k: int) -> TopIds:
        """Build from the log-probs by id of each position, of which only the k largest are kept.

        >>> top = TopIds.of([{7: -0.7, 3: -0.2, 9: -5.0}, {4: 0.0}], 2)
        >>> top.ids.tolist()
        [[3, 7], [4, -1]]
        """
        best = [sorted(each.items(), key=lambda pair: -pair[1])[:k] for each in found]
        rows = [pairs + [(-1, -torch.inf)] * (k - len(pairs)) for pairs in best]
        ids = torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.int64).reshape(-1, k)
        values = torch.tensor([[value for _, value in row] for row in rows], dtype=torch.float64).reshape(-1, k)
        ids[values == -torch.inf] = -1
        # Where fewer ids than were asked for have a probability, nothing is left for others.
        tail = log_tail_mass(values).masked_fill((ids == -1).any(-1), -torch.inf)
        return cls(ids, values.float(), tail)

    @classmethod
    def nothing(cls, positions: int, k: int) -> TopIds:
        """Return what stands at positions of which nothing is known: no ids, and log-probs of 0.0."""
        return cls(torch.full((positions, k), -1), torch.zeros(positions, k), torch.zeros(positions))

    @staticmethod
    def cat(parts: Sequence[TopIds], k: int) -> TopIds:
        """Return the positions of all `parts`, one part after another."""
        parts = [TopIds.nothing(0, k), *parts]
        columns = zip(*((part.ids, part.logprobs, part.tail) for part in parts), strict=True)
        return TopIds(*(torch.cat(column) for column in columns))


def log_tail_mass(logprobs: Tensor) -> Tensor:
    """Return the log of the probability that the ids which are not among the given ones have together.

    For engines that report the log-probs of some ids only. Those are rounded, so the result is only as good as their
    sum: a tail of 1e-6 may be off by a tenth. It is -inf if their probabilities add up to 1 or, by rounding, to more.

    Args:
        logprobs: float[..., k].

    Returns:
        float32[...].
    """
    mass = logprobs.double().exp().sum(-1)
    return torch.log1p(-mass.clamp(max=1.0)).float()
