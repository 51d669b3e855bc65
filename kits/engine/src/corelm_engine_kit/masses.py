"""What a step of sampling knows of a distribution besides the token it drew: the ids that truncation left, the most
probable ids, and the probability that these have together.

Everything is computed from the scores of one step, ``[rows, V]``, and stored flat: no table of all steps is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corelm.spec import Ragged, TokenSets, TopIds
from corelm_engine_kit.softmax import Workspace

#: Up to how many columns the ids that are left are sorted.
_FEW = 1024


@dataclass(frozen=True, eq=False)
class KeptIds:
    """The ids that truncation left, position after position.

    Attributes:
        ids: int32[total], those of the first position, then those of the next one, each ascending. On the CPU: those
            of many long answers would fill a GPU.
        counts: int64[positions], how many ids each position has.
        log_mass: float32[positions], the log of the probability that they had together before truncation.
    """

    ids: Tensor
    counts: Tensor
    log_mass: Tensor

    @staticmethod
    def ordered(steps: Sequence[KeptIds], order: Tensor, lengths: Tensor) -> tuple[TokenSets, Ragged]:
        """Return the ids and the log-masses of rows.

        Args:
            steps: those of each step of decoding.
            order: int64[n]: the positions of all steps, counted one step after another, in the order of the rows.
            lengths: int64[rows], how many of them belong to each row.
        """
        sets = Ragged(torch.cat([step.ids for step in steps]), torch.cat([step.counts for step in steps])).select(order)
        log_mass = torch.cat([step.log_mass for step in steps]).cpu()[order]
        return TokenSets(sets.with_values(sets.values.long()), lengths), Ragged(log_mass, lengths)


def kept_ids(scores: Tensor, candidates: Tensor | None, total: Tensor, vocab_size: int) -> KeptIds:
    """Return the ids that are not cut, also those whose probability float32 rounds to 0.

    Args:
        scores: float32[rows, K], -inf where a column is cut.
        candidates: int64[rows, K], the ids of the columns; None if the columns are the vocabulary itself.
        total: float64[rows], the `log_total` of the scores before they were cut.
        vocab_size: every id is below it.
    """
    marks = left = scores > -math.inf
    many = candidates is not None and candidates.shape[-1] > _FEW
    if candidates is not None and many:
        # In the order of the vocabulary. Sorting this many ids would take five times as long.
        marks = left.new_zeros(len(left), vocab_size).scatter_(-1, candidates, left)
    rows, ids = marks.nonzero(as_tuple=True)
    if candidates is not None and not many:
        # One sort for all rows: above the bits of each id stands the number of its row.
        ids = ((rows << 32) + candidates[rows, ids]).sort().values & 0xFFFFFFFF
    log_mass = (log_total(scores) - total).clamp_max(0.0)
    return KeptIds(ids.int().cpu(), left.sum(-1), log_mass.float())


def most_probable(scores: Tensor, candidates: Tensor | None, k: int, total: Tensor) -> TopIds:
    """Return the k most probable ids of each row and the log of the mass of all others, on the CPU like `KeptIds`.

    That mass is summed over the others themselves: a tail of 1e-9 would be lost in 1 minus the rest.

    Args:
        scores: float32[rows, K], -inf where an id has no probability.
        candidates: int64[rows, K], the ids of the columns; None if the columns are the vocabulary itself.
        k: may be more than K.
        total: float64[rows], the `log_total` of the scores.
    """
    width = scores.shape[-1]
    found, columns = scores.topk(min(k, width))
    tail = torch.full_like(total, -math.inf)
    if k < width:
        tail = (log_total(scores.scatter(-1, columns, -math.inf)) - total).clamp_max(0.0)
    logprobs = (found.double() - total[:, None]).clamp_max(0.0).float()
    ids = columns if candidates is None else candidates.gather(-1, columns)
    ids = ids.masked_fill(found == -math.inf, -1)
    missing = (0, k - found.shape[-1])
    pad = torch.nn.functional.pad
    # One tensor is one wait.
    numbers = torch.cat([pad(logprobs, missing, value=-math.inf), tail.float()[:, None]], dim=-1).cpu()
    return TopIds(pad(ids, missing, value=-1).cpu(), numbers[:, :k], numbers[:, k])


def log_total(scores: Tensor, workspace: Workspace | None = None) -> Tensor:
    """Return float64[rows]: the log-sum-exp of float32[rows, K]; -inf for a row of -inf.

    softmax is the fastest way through a large vocabulary. Its own sum is rounded (see `draw`), so its result is
    summed once more.
    """
    workspace = workspace or Workspace()
    best, largest, mass = workspace.reduced(scores, _totals).double().unbind(-1)
    # These are few but large numbers with a small difference, which float64 keeps.
    total = best - largest.log() + mass.log()
    # softmax of nothing but -inf is NaN.
    return torch.where(best == -math.inf, best, total)


def _totals(scores: Tensor, mass: Tensor) -> Tensor:
    """Return ``[n, 3]``: the largest score, the largest mass, and the sum of the masses."""
    return torch.stack([scores.amax(-1), mass.amax(-1), mass.sum(-1)], dim=-1)


def log_softmax_at(logits: Tensor, ids: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the log-softmax of float32[rows, V] at int64[rows] or int64[rows, k], float32 of that shape.

    The id asked for may have underflowed in softmax, so its score itself is used.

    Args:
        total: float64[rows], the `log_total` of the logits if it is known.
    """
    chosen = logits.gather(-1, ids.view(len(ids), -1)).double()
    return (chosen - (log_total(logits) if total is None else total)[:, None]).float().view(ids.shape)
