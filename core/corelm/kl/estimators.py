"""KL divergence from log-probabilities or logits, as pure functions of ``(gen, ref, mask)``; and how to sum it up.

One convention throughout: `gen` is the log-probability, in nats, of each token under the policy that sampled it, `ref`
that of the same token under the reference. Estimated is KL(gen‖ref), the mean of ``gen − ref`` over tokens drawn from
gen; in the notation of Schulman's note, ``log r = ref − gen``. Expectations below are over such tokens.

============ ===================== ================================================= ==============================
name         value                 expectation                                       expected gradient, to gen
============ ===================== ================================================= ==============================
`k1`         −log r                KL(gen‖ref)                                       0
`k2`         ½ (log r)²            near it where the two are near                    ∇ KL(gen‖ref)
`k3`         r − 1 − log r         KL(gen‖ref)                                       ∇ KL(ref‖gen): the other way round
`abs_kl`     \\|log r\\|             an upper bound                                    of no KL
`k1_st`      k1                    KL(gen‖ref)                                       ∇ KL(gen‖ref)
`k3_st`      k3                    KL(gen‖ref)                                       ∇ KL(gen‖ref)
============ ===================== ================================================= ==============================

The expected gradient is that of a loss which is differentiated through, token by token (the effect of a token on where
later ones are drawn is not in it; arXiv:2506.09477). Taken from a reward and not differentiated, `k1` (or `k1_st`) is
the one whose policy gradient is that of KL(gen‖ref); the others are biased.

Sources: J. Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html): k1, k2, k3 and their values.
Y. Tang and R. Munos, On a few pitfalls in KL divergence gradient estimation for RL, arXiv:2506.09477: the gradients of
k1 and k3. K. Liu et al., Rethinking KL Regularization in RLHF, arXiv:2510.01555: k2 as a loss is k1 in the reward.
V. Shah et al., A Comedy of Estimators, arXiv:2512.21852: which of them are biased where.

Every function returns a tensor of the shape of `mask`, float32 (float64 if the inputs are), and 0.0 with no gradient
where `mask` is False, whatever stands there, be it NaN or infinite. ``mask=None`` counts every position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from corelm.errors import InvalidRequestError
from corelm.tensors.ragged import Ragged
from corelm.validate import count, one_of

Estimator = Callable[[Tensor, Tensor, Tensor | None], Tensor]
How = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"]

#: No larger log-ratio is exponentiated: float32 ends at 88, and an infinite ratio has NaN for a gradient.
MAX_LOG_RATIO = 20.0
#: `k3` is cut here, in nats: where ref finds a token that gen drew ten thousand times as likely, which would be all of
#: the mean. What that takes off the expectation is at most the probability ref gives to such tokens.
MAX_K3 = 1e4


def k1(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """``gen − ref``. Unbiased, of high variance, and negative for some tokens (Schulman 2020).

    For the reward. As a loss its expected gradient is zero (arXiv:2506.09477).
    """
    return _log_ratio(gen, ref, mask)


def k2(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """``½ (gen − ref)²``. Biased as a value, of low variance; as a loss its gradient is right (Schulman 2020;
    arXiv:2510.01555).
    """
    return 0.5 * _log_ratio(gen, ref, mask).square()


def k3(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """``r − 1 − log r`` with ``r = exp(ref − gen)``. Unbiased, never negative, of low variance (Schulman 2020); cut at
    `MAX_K3`.

    GRPO's penalty (Shao et al., arXiv:2402.03300). As a loss its expected gradient is that of KL(ref‖gen), which is
    the wanted one to first order; `k3_st` has the same value and the wanted gradient.
    """
    away = _log_ratio(gen, ref, mask)
    return (torch.expm1((-away).clamp(max=MAX_LOG_RATIO)) + away).clamp(max=MAX_K3)


def abs_kl(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """``|gen − ref|``: how far two scorings are apart. No estimate of KL, and biased in either place."""
    return _log_ratio(gen, ref, mask).abs()


def k1_st(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """The value of `k1` with the gradient of `k2`: both unbiased (gradient: arXiv:2510.01555)."""
    return _straight_through(k1, gen, ref, mask)


def k3_st(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """The value of `k3` with the gradient of `k2`: both unbiased (gradient: arXiv:2510.01555)."""
    return _straight_through(k3, gen, ref, mask)


def exact(gen_logits: Tensor, ref_logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """KL(gen‖ref) of the two next-token distributions: the sum over the vocabulary, value and gradient.

    Args:
        gen_logits, ref_logits: ``[..., V]``, normalised or not. A token of logit −inf under gen adds nothing; one that
            only ref excludes makes the KL infinite.
        mask: bool ``[...]``. Only positions that count are normalised.
    """
    return _of_logits(_exact, gen_logits, ref_logits, mask)


def top_k(gen_logits: Tensor, ref_logits: Tensor, mask: Tensor | None = None, *, k: int) -> Tensor:
    """KL(gen‖ref) over the `k` likeliest tokens of gen and one bucket that holds all the others.

    It is never negative, never above `exact` (merging outcomes can only lower a divergence: the log-sum inequality,
    Cover and Thomas, Elements of Information Theory) and equal to it from ``k = V − 1`` on.

    Args:
        gen_logits, ref_logits, mask: as in `exact`.
        k: at least 1.

    Raises:
        InvalidRequestError: `k` is below 1.
    """
    k = count("k", k, 1)
    if k >= gen_logits.shape[-1]:
        return exact(gen_logits, ref_logits, mask)
    return _of_logits(functools.partial(_top_k, k=k), gen_logits, ref_logits, mask)


#: The estimators that take log-probabilities, by the names that `KLComputation` takes.
ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": abs_kl, "k1_st": k1_st, "k3_st": k3_st}


def aggregate(values: Tensor | Ragged, mask: Tensor | Ragged | None = None, how: How = "token-mean") -> Tensor:
    """One number of many tokens' values; gradients flow to those that count.

    ============================ ============================================================
    `token-mean`                 the mean over all tokens of all sequences: long ones weigh more
    `token-sum`                  the sum over all tokens
    `seq-mean-token-sum`         the mean over sequences of their sums
    `seq-mean-token-mean`        the mean over sequences of their means: each weighs the same
    ============================ ============================================================

    A sequence of which no token counts is none: it is left out of the mean over sequences. Of nothing at all the
    result is 0.0.

    >>> values, mask = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    >>> [float(aggregate(values, mask, how)) for how in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")]
    [2.75, 5.5, 3.5]

    Args:
        values: float ``[..., time]``, or a `Ragged` of rows.
        mask: bool, of the same form; None counts everything.

    Returns:
        float32 (float64 of float64), of shape ().

    Raises:
        InvalidRequestError: an unknown `how`, or values and mask of different shapes.
    """
    one_of("how", how, get_args(How))
    sums, counts = _per_sequence(values, mask)
    if how == "token-sum":
        return sums.sum()
    if how == "token-mean":
        return sums.sum() / counts.sum().clamp_min(1)
    if how == "seq-mean-token-mean":
        sums = sums / counts.clamp_min(1)
    return sums.sum() / (counts > 0).sum().clamp_min(1)


def _per_sequence(values: Tensor | Ragged, mask: Tensor | Ragged | None) -> tuple[Tensor, Tensor]:
    """The sum of what counts in every sequence, and how much that is: two tensors ``[sequences]``."""
    if isinstance(values, Ragged):
        if mask is not None and not (isinstance(mask, Ragged) and torch.equal(mask.lengths, values.lengths)):
            raise InvalidRequestError("mask: rows of values need a mask of rows as long as they are", field="mask")
        kept, counted = _kept(values.values, mask.values if isinstance(mask, Ragged) else None)
        rows = values.row_index.to(kept.device)
        nothing = kept.new_zeros(len(values))
        return nothing.index_add(0, rows, kept), nothing.index_add(0, rows, counted)
    if not isinstance(values, Tensor):
        raise InvalidRequestError(
            f"values: expected a tensor or a Ragged, got {type(values).__name__}; "
            "corelm.ragged(td, key) makes one of rows of their own length",
            field="values",
        )
    if isinstance(mask, Ragged):
        raise InvalidRequestError("mask: a tensor of values needs a tensor for a mask", field="mask")
    kept, counted = _kept(values, mask)
    return kept.sum(-1).flatten(), counted.sum(-1).flatten()


def _kept(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    mask = _positions(mask, values)
    values = values.to(_dtype(values))
    return torch.where(mask, values, 0.0), mask.to(values.dtype)


def _log_ratio(gen: Tensor, ref: Tensor, mask: Tensor | None) -> Tensor:
    """``gen − ref``, 0.0 where nothing counts."""
    if gen.shape != ref.shape:
        raise InvalidRequestError(
            f"gen and ref are of the same tokens and have one shape; got {tuple(gen.shape)} and {tuple(ref.shape)}",
            field="ref",
        )
    mask, dtype = _positions(mask, gen), _dtype(gen, ref)
    # Before anything that is not linear, so that what is left out becomes no NaN in the gradient either.
    return torch.where(mask, gen.to(dtype) - ref.to(dtype), 0.0)


def _straight_through(value: Estimator, gen: Tensor, ref: Tensor, mask: Tensor | None) -> Tensor:
    slope = k2(gen, ref, mask)
    # The bracket is exactly zero, so the value is that of the estimator to the last bit.
    return value(gen.detach(), ref.detach(), mask) + (slope - slope.detach())


def _of_logits(divergence: Callable[[Tensor, Tensor], Tensor], gen: Tensor, ref: Tensor, mask: Tensor | None) -> Tensor:
    if gen.shape != ref.shape:
        raise InvalidRequestError(
            "gen_logits and ref_logits are over the same positions and one vocabulary; "
            f"got {tuple(gen.shape)} and {tuple(ref.shape)}",
            field="ref_logits",
        )
    mask, dtype = _positions(mask, gen[..., 0]), _dtype(gen, ref)
    found = divergence(gen[mask].to(dtype).log_softmax(-1), ref[mask].to(dtype).log_softmax(-1))
    return found.new_zeros(mask.shape).masked_scatter(mask, found)


def _exact(gen: Tensor, ref: Tensor) -> Tensor:
    return _expected_log_ratio(gen, ref).sum(-1)


def _top_k(gen: Tensor, ref: Tensor, k: int) -> Tensor:
    best = gen.detach().topk(k, -1).indices
    rest = [_total(table.scatter(-1, best, -torch.inf)) for table in (gen, ref)]
    buckets = [torch.cat([table.gather(-1, best), tail], -1) for table, tail in zip((gen, ref), rest, strict=True)]
    return _exact(*buckets)


def _total(table: Tensor) -> Tensor:
    """The log of the sum of probabilities, ``[..., 1]``; of none it is −inf, with a gradient of zero and not NaN."""
    possible = (table > -torch.inf).any(-1, keepdim=True)
    return torch.where(possible, torch.where(possible, table, 0.0).logsumexp(-1, keepdim=True), -torch.inf)


def _expected_log_ratio(gen: Tensor, ref: Tensor) -> Tensor:
    """``p log (p / q)`` of log-probabilities, 0 where p is 0."""
    possible = gen > -torch.inf
    gen, ref = torch.where(possible, gen, 0.0), torch.where(possible, ref, 0.0)
    return torch.where(possible, gen.exp() * (gen - ref), 0.0)


def _positions(mask: Tensor | None, values: Tensor) -> Tensor:
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    if mask.shape != values.shape or mask.dtype.is_floating_point:
        raise InvalidRequestError(
            f"mask: expected bool{list(values.shape)}, got {mask.dtype}{list(mask.shape)}", field="mask"
        )
    return mask.to(values.device, torch.bool)


def _dtype(*tensors: Tensor) -> torch.dtype:
    """At least float32: a log-prob of −8 has two decimals in bfloat16, and half of them go in the difference."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
