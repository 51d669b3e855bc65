"""KL divergence from log-probabilities or logits, as pure functions of ``(gen, ref, mask)``; and `aggregate`.

One convention throughout: `gen` is the log-probability, in nats, of each token under the policy that sampled it; `ref`
is the log-probability of the same token under the reference. The functions estimate KL(gen‖ref), the mean of
``gen − ref`` over tokens drawn from gen; in the notation of Schulman's note, ``log r = ref − gen``. Expectations below
are over such tokens.

============ ===================== ================================================= ==============================
name         value                 expectation                                       expected gradient, to gen
============ ===================== ================================================= ==============================
`k1`         −log r                KL(gen‖ref)                                       0
`k2`         ½ (log r)²            close to KL(gen‖ref) if gen and ref are close     ∇ KL(gen‖ref)
`k3`         r − 1 − log r         KL(gen‖ref)                                       ∇ KL(ref‖gen), the reverse
`abs_kl`     \\|log r\\|             an upper bound of KL(gen‖ref)                     not of a KL
`k1_st`      k1                    KL(gen‖ref)                                       ∇ KL(gen‖ref)
`k3_st`      k3                    KL(gen‖ref)                                       ∇ KL(gen‖ref)
============ ===================== ================================================= ==============================

The expected gradient is that of the estimator as a loss, differentiated token by token, without the effect of a token
on where later ones are drawn. If an estimator is subtracted from a reward and not differentiated, only `k1` and `k1_st`
have the policy gradient of KL(gen‖ref); the others are biased.

Sources: J. Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html): values. Y. Tang and R. Munos,
arXiv:2506.09477: gradients of k1 and k3. K. Liu et al., arXiv:2510.01555: k2 as a loss is k1 in the reward. V. Shah et
al., arXiv:2512.21852: which are biased in which use.

Every function returns a tensor of the shape of `mask`, float32 (float64 for float64 inputs). Where `mask` is False the
result is 0.0 without a gradient, even if the inputs are NaN or infinite there. ``mask=None`` counts every position.
`corelm.kl` says what NaN and infinity give where a position counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from corelm.tensors.categorical import log_probs
from corelm.tensors.ragged import Ragged, counted_positions
from corelm.validate import count, invalid, one_of

Estimator = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Reduction = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"]

#: Larger log-ratios are clamped before `exp`: float32 overflows at 88, and an infinite ratio has a gradient of NaN.
MAX_LOG_RATIO = 20.0
#: Upper limit of `k3`, in nats. It applies where ref finds a sampled token ten thousand times as likely as gen does;
#: one such token would dominate the mean. The limit lowers the expectation by at most the probability that ref gives to
#: such tokens.
MAX_K3 = 1e4
_ROWS = "; corelm.ragged(td, ('log_probs', 'full')) reads such rows as a Ragged, whose values are one tensor"


def k1(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``gen − ref``: unbiased, with high variance, negative for some tokens. Use it in the reward."""
    return _log_ratio(gen, ref, mask)


def k2(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``½ (gen − ref)²``: biased as a value, with low variance; as a loss its gradient is ∇ KL(gen‖ref).

    The square overflows to +inf, in float32 beyond a gap of 1.8e19 nats; the gradient, ``gen − ref``, stays right.
    """
    return 0.5 * _log_ratio(gen, ref, mask).square()


def k3(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``r − 1 − log r`` with ``r = exp(ref − gen)``: unbiased, never negative, with low variance.

    Values are clamped to `MAX_K3`. It is GRPO's penalty (Shao et al., arXiv:2402.03300). As a loss its expected
    gradient is that of KL(ref‖gen), which equals ∇ KL(gen‖ref) to first order; `k3_st` has that of KL(gen‖ref).
    """
    # Both terms take the clamped ratio: a far larger one would make the difference negative. MAX_K3 is reached earlier.
    log_r = _at_most(-_log_ratio(gen, ref, mask), MAX_LOG_RATIO)
    return _at_most(torch.expm1(log_r) - log_r, MAX_K3)


def abs_kl(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``|gen − ref|``: how far two scorings differ. Not a KL estimate; biased both in a reward and in a loss."""
    return _log_ratio(gen, ref, mask).abs()


def k1_st(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the value of `k1` with the gradient of `k2`: both unbiased."""
    return _straight_through(k1, gen, ref, mask)


def k3_st(gen: Tensor, ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the value of `k3` with the gradient of `k2`: both unbiased."""
    return _straight_through(k3, gen, ref, mask)


def exact(gen_logits: Tensor, ref_logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return KL(gen‖ref) of the two next-token distributions, summed over the vocabulary; value and gradient are exact.

    Args:
        gen_logits: float ``[..., V]``, normalised or not. A token with logit −inf adds nothing.
        ref_logits: ``[..., V]``, normalised or not. A token that has logit −inf here but not in `gen_logits` makes the
            KL infinite.
        mask: bool ``[...]``. Only positions that count are normalised.

    Raises:
        InvalidRequestError: the logits have different shapes or no vocabulary, or the mask does not fit.
    """
    return _of_logits(_exact, gen_logits, ref_logits, mask)


def top_k(gen_logits: Tensor, ref_logits: Tensor, mask: Tensor | None = None, *, k: int) -> Tensor:
    """Return KL(gen‖ref) over the `k` likeliest tokens of gen and one bucket that holds all other tokens.

    It is never negative and never above `exact`, because merging outcomes can only lower a divergence. From
    ``k = V − 1`` on it equals `exact`. `k` is at least 1; the other arguments and the errors are those of `exact`.
    """
    return _of_logits(functools.partial(_top_k, k=count("k", k, 1)), gen_logits, ref_logits, mask)


#: The estimators of log-probabilities, by the names that `KLComputation` accepts.
ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": abs_kl, "k1_st": k1_st, "k3_st": k3_st}


def aggregate(values: Tensor | Ragged, mask: Tensor | Ragged | None = None, how: Reduction = "token-mean") -> Tensor:
    """Reduce per-token values to one number; gradients flow to the tokens that count.

    ============================ ============================================================================
    `token-mean`                 the mean over all tokens of all sequences: long sequences weigh more
    `token-sum`                  the sum over all tokens
    `seq-mean-token-sum`         the mean over sequences of each sequence's sum
    `seq-mean-token-mean`        the mean over sequences of each sequence's mean: all sequences weigh the same
    ============================ ============================================================================

    A sequence without a token that counts is left out of the mean over sequences. If no token counts at all, the
    result is 0.0. NaN in a value that counts makes the result NaN.

    >>> values, mask = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    >>> [float(aggregate(values, mask, how)) for how in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")]
    [2.75, 5.5, 3.5]

    Args:
        values: float ``[..., time]``, or a `Ragged` of rows.
        mask: bool, in the same layout as `values`; None counts every token.
        how: the reduction, from the table above.

    Returns:
        float32 (float64 for float64 values), of shape ().

    Raises:
        InvalidRequestError: `how` is unknown, or values and mask differ in shape.
    """
    one_of("how", how, get_args(Reduction))
    if isinstance(values, Ragged):
        if mask is None:
            mask = values.mask()
        elif isinstance(mask, Ragged) and torch.equal(mask.lengths, values.lengths):
            mask = mask.to_padded(False)
        else:
            raise invalid("mask", "expected a Ragged with rows of the same lengths as those of values")
        values = values.to_padded(0.0)
    if not isinstance(values, Tensor):
        raise invalid("values", f"expected a tensor or a Ragged, got {type(values).__name__}{_ROWS}")
    where, values = counted_positions(mask, values), values.to(wide_dtype(values))
    sums, counts = torch.where(where, values, 0.0).sum(-1), where.to(values.dtype).sum(-1)
    if how == "token-sum":
        return sums.sum()
    if how == "token-mean":
        return sums.sum() / counts.sum().clamp_min(1)
    if how == "seq-mean-token-mean":
        sums = sums / counts.clamp_min(1)
    return sums.sum() / (counts > 0).sum().clamp_min(1)


def _log_ratio(gen: Tensor, ref: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``gen − ref``: 0.0 where the mask is False, and NaN where one of them is not a log-prob of the token."""
    _check_alike(gen, ref, ("gen", "ref"))
    mask, dtype = counted_positions(mask, gen), wide_dtype(gen, ref)
    gen, ref = gen.to(dtype), ref.to(dtype)
    undefined = ~torch.isfinite(gen) | (ref == torch.inf)
    # Add NaN instead of choosing it, which would hide it from the gradient.
    difference = gen - ref + torch.zeros_like(gen).masked_fill(undefined, torch.nan)
    # Mask before any nonlinear step: otherwise masked positions could put NaN into the gradient.
    return torch.where(mask, difference, 0.0)


def _straight_through(value: Estimator, gen: Tensor, ref: Tensor, mask: Tensor | None) -> Tensor:
    # Autograd does not see that the value of `k2` is replaced. The usual way, ``value + (slope − slope.detach())``, is
    # NaN where the slope is infinite.
    found = k2(gen, ref, mask).clone()
    found.detach().copy_(value(gen.detach(), ref.detach(), mask))
    return found


def _of_logits(divergence: Callable[[Tensor, Tensor], Tensor], gen: Tensor, ref: Tensor, mask: Tensor | None) -> Tensor:
    _check_alike(gen, ref, ("gen_logits", "ref_logits"))
    if not gen.ndim or not gen.shape[-1]:
        raise invalid("gen_logits", f"expected [..., vocabulary], got shape {tuple(gen.shape)}")
    mask, dtype = counted_positions(mask, gen[..., 0]), wide_dtype(gen, ref)
    found = divergence(log_probs(gen[mask].to(dtype)), log_probs(ref[mask].to(dtype)))
    return found.new_zeros(mask.shape).masked_scatter(mask, found)


def _exact(gen: Tensor, ref: Tensor) -> Tensor:
    # Autograd through the term of a token that gen excludes would be NaN.
    possible = gen != -torch.inf
    return expected_log_ratio(torch.where(possible, gen, 0.0), torch.where(possible, ref, 0.0)).sum(-1)


def _top_k(gen: Tensor, ref: Tensor, k: int) -> Tensor:
    if k >= gen.shape[-1]:
        return _exact(gen, ref)
    best = gen.detach().topk(k, -1).indices
    rest = [_total(table.scatter(-1, best, -torch.inf)) for table in (gen, ref)]
    buckets = [torch.cat([table.gather(-1, best), tail], -1) for table, tail in zip((gen, ref), rest, strict=True)]
    return _exact(*buckets)


def _total(table: Tensor) -> Tensor:
    """Return the log of the summed probabilities, ``[..., 1]``. If all are 0 it is −inf, with gradient 0, not NaN."""
    # Not `>`: NaN must reach the sum.
    possible = (table != -torch.inf).any(-1, keepdim=True)
    return torch.where(possible, torch.where(possible, table, 0.0).logsumexp(-1, keepdim=True), -torch.inf)


def expected_log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``p (log p − log q)``: 0 where p is 0, inf where q is 0 and p is not. NaN stays NaN."""
    gap = log_p - log_q
    # A probability that rounds to 0 times an infinite gap would be NaN; the KL is infinite.
    terms = torch.where(gap == torch.inf, gap, log_p.exp() * gap)
    # Not `>`: a NaN is not impossible, and a diverged model must not have a KL of 0.
    return terms.masked_fill_(log_p == -torch.inf, 0.0)


def _at_most(values: Tensor, limit: float) -> Tensor:
    # The gradient of `clamp` is 0 where a value is NaN; this one is NaN.
    return torch.minimum(values, values.new_tensor(limit))


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return at least float32: a log-prob of −8 has two decimals in bfloat16, too few for a difference."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _check_alike(gen: Any, ref: Any, names: tuple[str, str]) -> None:
    for name, given in zip(names, (gen, ref), strict=True):
        if not isinstance(given, Tensor):
            raise invalid(name, f"expected a tensor, got {type(given).__name__}{_ROWS}")
    must_agree(names[1], f"{names[0]} and {names[1]} must have one shape", gen.shape, ref.shape)


def must_agree(field: str, what: str, one: torch.Size, other: torch.Size) -> None:
    """Refuse shapes that differ."""
    if one != other:
        raise invalid(field, f"{what}; got {tuple(one)} and {tuple(other)}")
