"""What one outcome adds to the divergence of two distributions, and the derivative of it by the student's log-prob.

p is the teacher's probability of the outcome and q the student's. The divergence of the two distributions is the sum
of the terms over all outcomes.

================ ======================================================= ==============================================
kind             divergence                                              its derivative by log q
================ ======================================================= ==============================================
`forward_kl`     KL(p‖q) = Σ p (log p − log q)                           −p
`reverse_kl`     KL(q‖p) = Σ q (log q − log p)                           q (log q − log p + 1)
`js`             β KL(p‖m) + (1 − β) KL(q‖m), m = β p + (1 − β) q         (1 − β) q (log q − log m)
================ ======================================================= ==============================================

`js` is the generalised Jensen-Shannon divergence, as in Agarwal et al., On-Policy Distillation of Language Models
(GKD), arXiv:2306.13649, section 2; β = ½ is that of J. Lin, Divergence measures based on the Shannon entropy, IEEE
Transactions on Information Theory 37, 1991. It is at most −β log β − (1 − β) log(1 − β), log 2 for β = ½. Divided by β,
it tends to the forward KL as β → 0; divided by 1 − β, to the reverse KL as β → 1.

An outcome of probability 0 adds nothing (0 · log 0 = 0) and has a derivative of 0. An outcome that has a probability in
the first argument of a KL and none in the second makes it infinite; `js` is always finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from corelm.validate import invalid, number, one_of, shown

Divergence = Literal["forward_kl", "reverse_kl", "js"]

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one kind of divergence. All methods take and return tensors of one shape, and record no gradients.

    Attributes:
        kind: which divergence.
        beta: of `js`, between 0 and 1: the weight of the teacher. Ignored by the others.
    """

    kind: Divergence
    beta: float = 0.5

    @classmethod
    def checked(cls, kind: Any, beta: Any) -> Terms:
        """Return the terms that the arguments of a public function ask for.

        Raises:
            InvalidRequestError: the kind is unknown, or `beta` is not between 0 and 1.
        """
        one_of("kind", kind, DIVERGENCES)
        weight = number("beta", beta, 0.0, above=True)
        if not weight < 1.0:
            raise invalid(
                "beta",
                f"expected a number above 0 and below 1, got {shown(beta)}; at 0 and 1 the divergence is 0: pass "
                "kind='forward_kl' or kind='reverse_kl'",
            )
        return cls(kind, weight)

    @torch.no_grad()
    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return the term of each outcome."""
        if self.kind == "forward_kl":
            return _expected(log_p, log_q)
        if self.kind == "reverse_kl":
            return _expected(log_q, log_p)
        log_m = self._mixture(log_p, log_q)
        return _expected(log_p, log_m).mul_(self.beta).add_(_expected(log_q, log_m), alpha=1.0 - self.beta)

    @torch.no_grad()
    def slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return the derivative of each term by ``log_q``, the log-probs taken for independent numbers."""
        if self.kind == "forward_kl":
            return log_p.exp().neg_()
        if self.kind == "reverse_kl":
            return _expected(log_q, log_p).add_(log_q.exp())
        return _expected(log_q, self._mixture(log_p, log_q)).mul_(1.0 - self.beta)

    @property
    def known(self) -> float:
        """What is known beforehand of the sum of all slopes, because probabilities sum to 1; see `sums`."""
        return {"forward_kl": -1.0, "reverse_kl": 1.0, "js": 0.0}[self.kind]

    @torch.no_grad()
    def sums(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the sums of the terms and of the slopes over the last dimension, the latter without `known`.

        Over all outcomes, the slopes sum to `known` plus the second. This takes half as long as both methods above.
        """
        if self.kind == "js":
            log_m = self._mixture(log_p, log_q)
            student = _expected(log_q, log_m).sum(-1) * (1.0 - self.beta)
            return _expected(log_p, log_m).sum(-1) * self.beta + student, student
        value = self.value(log_p, log_q).sum(-1)
        return value, 0.0 if self.kind == "forward_kl" else value

    def _mixture(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))


def _expected(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``p (log p − log q)``: 0 where p is 0, inf where q is 0 and p is not. NaN stays NaN."""
    gap = log_p - log_q
    # A probability that rounds to 0 times an infinite gap would be NaN; the divergence is infinite.
    terms = torch.where(gap == torch.inf, gap, log_p.exp() * gap)
    # Not `>`: a NaN is not impossible.
    return terms.masked_fill_(log_p == -torch.inf, 0.0)
