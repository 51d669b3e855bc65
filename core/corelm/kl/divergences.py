"""Divergences of two next-token distributions of which the log-probs of k ids and of all others together are known.

An engine that serves a large model does not return its whole distribution: it returns the log-probs of its k most
probable ids and the mass of all others, the tail. The student is scored at the same ids. All other ids are then one
outcome, so both sides are distributions over k + 1 outcomes, and their divergence is a bound of the exact one:

- **From below.** Merging outcomes never raises a KL or a Jensen-Shannon divergence: the data-processing inequality,
  which for a KL is the log-sum inequality (Cover and Thomas, Elements of Information Theory, theorem 2.7.1), and holds
  for every f-divergence (Csiszár and Shields, Information Theory and Statistics: A Tutorial, 2004, lemma 4.1). It is
  equality if p / q is the same for all ids of the tail, so also if k is the size of the vocabulary or one less.
- **From above.** There is no bound of a KL: one id of the tail to which the second distribution gives almost nothing
  makes the exact one as large as you like. `js_upper_bound` is one of the Jensen-Shannon divergence.

The gradient is that of the bound, and the exact one where the bound is. It pulls the student's tail to the teacher's
mass, but says nothing about how that mass is spread over the ids of the tail.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corelm.errors import InvalidRequestError, Problems, refuse
from corelm.kl.divergence_terms import Divergence, Terms
from corelm.kl.estimators import counted_positions
from corelm.validate import invalid

#: How far a sum of probabilities may be from 1. Engines round log-probs to float32, and some compute them in less.
_ROUNDING, _SHORT_ROUNDING = 1e-3, 0.05


@dataclass(frozen=True, eq=False)
class TopLogProbs:
    """The log-probs of k ids at each position, and of all others together.

    Attributes:
        log_probs: float ``[..., k]``; -inf where the id is -1.
        tail: float ``[...]``: the log of the probability that all other ids have together, -inf if they have none.
        ids: int64 ``[..., k]``, or None. Those of a position differ from one another; -1 stands for no id. If both
            sides have them, they are compared.
    """

    log_probs: Tensor
    tail: Tensor
    ids: Tensor | None = None


def top_k_divergence(
    teacher: TopLogProbs,
    student: TopLogProbs,
    kind: Divergence = "forward_kl",
    *,
    beta: float = 0.5,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the divergence of teacher and student at each position, all ids but k being one outcome.

    It is never above the exact divergence, and equal to it if k covers the vocabulary; the gradient flows to the
    student's log-probs and tail. See `corelm.kl.divergences` for the bounds, and `corelm.kl.divergence_terms` for the
    formulas.

    >>> teacher = TopLogProbs(torch.tensor([[0.5, 0.3]]).log(), torch.tensor([0.2]).log())
    >>> student = TopLogProbs(torch.tensor([[0.4, 0.4]]).log(), torch.tensor([0.2]).log())
    >>> top_k_divergence(teacher, student).tolist()  # 0.5 · log(0.5 / 0.4) + 0.3 · log(0.3 / 0.4)
    [0.0252...]

    Args:
        teacher: the distribution that is learned from. No gradient flows to it.
        student: log-probs of the same ids.
        kind: `forward_kl` is KL(teacher‖student), `reverse_kl` is KL(student‖teacher), `js` the generalised
            Jensen-Shannon divergence.
        beta: of `js`, above 0 and below 1: the weight of the teacher in the mixture.
        mask: bool ``[...]``. Where it is False, the result is 0.0 without a gradient, and nothing is checked.

    Returns:
        float32 ``[...]`` (float64 for float64 inputs), in nats. NaN where a log-prob is NaN; inf where the second
        distribution of a KL has no probability for something that the first one has.

    Raises:
        InvalidRequestError: shapes or types do not fit; the probabilities of a position do not sum to 1, by more than
            rounding; its ids are not the same on both sides, or one is there twice. `rows` lists the rows at fault.
    """
    terms = Terms.checked(kind, beta)
    log_p, log_q, _ = _outcomes(teacher, student, mask)
    found: Tensor = _Sum.apply(log_p, log_q, terms)
    return found


def js_upper_bound(
    teacher: TopLogProbs, student: TopLogProbs, *, beta: float = 0.5, mask: Tensor | None = None
) -> Tensor:
    """Return an upper bound of the exact Jensen-Shannon divergence, of which `top_k_divergence` is the lower bound.

    The divergence is the mutual information of an outcome and of which side it was drawn from. By the chain rule
    (Cover and Thomas, theorem 2.5.2), merging the tail loses what its ids say about the side, which is at most the
    entropy of the side given the tail. The bound is reached if no id of the tail is possible on both sides. The gap of
    the two bounds is at most log 2 times the mass of the tail in the mixture.

    Arguments, result and errors are those of `top_k_divergence`. The result carries no gradient.
    """
    terms = Terms.checked("js", beta)
    with torch.no_grad():
        log_p, log_q, counts = _outcomes(teacher, student, mask)
        top = terms.value(log_p[..., :-1], log_q[..., :-1]).sum(-1)
        p, q = log_p[..., -1].exp(), log_q[..., -1].exp()
        bound = top - terms.beta * math.log(terms.beta) * p - (1 - terms.beta) * math.log1p(-terms.beta) * q
        return torch.where(counts, bound, 0.0)


class _Sum(torch.autograd.Function):
    """The sum of the terms of all outcomes. Autograd through the terms would be NaN where a probability is 0."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, terms: Terms) -> Tensor:
        ctx.save_for_backward(log_p, log_q)
        ctx.terms = terms
        return terms.value(log_p, log_q).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor, None]:
        slope = ctx.terms.slope(*ctx.saved_tensors)
        # A slope may be infinite where the caller has masked the position.
        return None, torch.where(upstream[..., None] == 0, 0.0, upstream[..., None] * slope), None


def _outcomes(teacher: TopLogProbs, student: TopLogProbs, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probs of all outcomes, ``[..., k + 1]`` of teacher and student, and which positions count.

    Where a position does not count, every outcome has probability 0 on both sides. Where a log-prob is NaN, all are.
    """
    for name, side in (("teacher", teacher), ("student", student)):
        _check_side(name, side)
    if teacher.log_probs.shape != student.log_probs.shape:
        raise invalid(
            "student",
            "teacher and student must have the same positions and ids; got log_probs of shapes "
            f"{tuple(teacher.log_probs.shape)} and {tuple(student.log_probs.shape)}",
        )
    device = student.log_probs.device
    counts = counted_positions(mask, student.tail)
    _check_ids(teacher, student, counts)
    dtype = functools.reduce(
        torch.promote_types, (tensor.dtype for side in (teacher, student) for tensor in (side.log_probs, side.tail))
    )
    dtype = torch.promote_types(dtype, torch.float32)
    tables = [
        torch.cat([side.log_probs, side.tail[..., None]], -1).to(device, dtype)
        for side in (replace(teacher, log_probs=teacher.log_probs.detach(), tail=teacher.tail.detach()), student)
    ]
    with torch.no_grad():
        for name, side, table in zip(("teacher", "student"), (teacher, student), tables, strict=True):
            _check_mass(name, table, counts, side.log_probs.dtype)
        broken = torch.stack([table.isnan().any(-1) for table in tables]).any(0) & counts
    # Add NaN instead of choosing it, which would hide it from the gradient.
    spoilt = torch.zeros_like(tables[1][..., :1]).masked_fill(broken[..., None], torch.nan)
    log_p, log_q = (table.masked_fill(~counts[..., None], -torch.inf) + spoilt for table in tables)
    return log_p, log_q, counts


# Checks ---------------------------------------------------------------------------------------------------------------


def _check_side(name: str, side: Any) -> None:
    if not isinstance(side, TopLogProbs):
        raise invalid(name, f"expected a TopLogProbs, got {type(side).__name__}")
    for field in ("log_probs", "tail"):
        given = getattr(side, field)
        if not isinstance(given, Tensor) or not given.is_floating_point():
            found = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise invalid(f"{name}.{field}", f"expected a tensor of floats, got {found}")
    shape = tuple(side.log_probs.shape)
    if not shape or not shape[-1]:
        raise invalid(f"{name}.log_probs", f"expected [..., k] with k of at least 1, got shape {shape}")
    if tuple(side.tail.shape) != shape[:-1]:
        raise invalid(
            f"{name}.tail", f"expected one number for each position, shape {shape[:-1]}; got {tuple(side.tail.shape)}"
        )
    if side.ids is None:
        return
    if not isinstance(side.ids, Tensor) or side.ids.is_floating_point() or side.ids.dtype == torch.bool:
        found = side.ids.dtype if isinstance(side.ids, Tensor) else type(side.ids).__name__
        raise invalid(f"{name}.ids", f"expected a tensor of ids, got {found}")
    if tuple(side.ids.shape) != shape:
        raise invalid(f"{name}.ids", f"expected the shape of log_probs, {shape}; got {tuple(side.ids.shape)}")


def _check_mass(name: str, table: Tensor, counts: Tensor, given: torch.dtype) -> None:
    """Refuse positions whose probabilities do not sum to 1: not log-probs, ids twice, or another tail."""
    mass = table.detach().double().exp().sum(-1)
    rounding = _ROUNDING if given.itemsize >= 4 else _SHORT_ROUNDING
    bad = counts & ((mass - 1.0).abs() > rounding)
    if bool(bad.any()):
        _refuse_at(
            bad,
            name,
            lambda at: f"the probabilities of the k ids and of the tail sum to {float(mass[at]):.6g}, not to 1",
        )


def _check_ids(teacher: TopLogProbs, student: TopLogProbs, counts: Tensor) -> None:
    for name, side in (("teacher", teacher), ("student", student)):
        if side.ids is not None:
            ordered = side.ids.sort(-1).values
            twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1).to(counts.device)
            if bool((twice & counts).any()):
                _refuse_at(twice & counts, f"{name}.ids", lambda at: "an id is there twice")
    if teacher.ids is None or student.ids is None:
        return
    ours, theirs = student.ids, teacher.ids.to(student.ids.device)
    other = (ours != theirs).any(-1).to(counts.device) & counts
    if bool(other.any()):

        def what(at: tuple[int, ...]) -> str:
            place = int((ours[at] != theirs[at]).nonzero()[0])
            return (
                f"id {int(ours[at][place])} is in place {place}, where the teacher has {int(theirs[at][place])}; score "
                "the student at the teacher's ids, in their order"
            )

        _refuse_at(other, "student.ids", what)


def _refuse_at(bad: Tensor, field: str, what: Any) -> None:
    """Raise for the first bad position of each row. The last dimension is the position, those before it the row."""
    problems: Problems = {}
    for at in bad.nonzero().tolist():
        row = 0
        for size, index in zip(bad.shape[:-1], at[:-1], strict=True):
            row = row * size + index
        if row not in problems:
            position = f"position {at[-1]}: " if at else ""
            problems[row] = f"{position}{what(tuple(at))}"
    if bad.ndim < 2:
        raise InvalidRequestError(f"{field}: {problems[0]}", field=field)
    refuse(problems, field)
