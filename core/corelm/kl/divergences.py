"""Divergences of a teacher's and a student's next-token distributions, with gradients to the student.

p is the teacher's probability of an outcome and q the student's. A divergence is the sum of terms over all outcomes:

================ ======================================================= ==============================================
kind             divergence                                              its derivative by log q
================ ======================================================= ==============================================
`forward_kl`     KL(p‖q) = Σ p (log p − log q)                           −p
`reverse_kl`     KL(q‖p) = Σ q (log q − log p)                           q (log q − log p + 1)
`js`             β KL(p‖m) + (1 − β) KL(q‖m), m = β p + (1 − β) q         (1 − β) q (log q − log m)
================ ======================================================= ==============================================

`js` is the generalised Jensen-Shannon divergence of Agarwal et al. (GKD), arXiv:2306.13649, section 2; β = ½ is that
of J. Lin, Divergence measures based on the Shannon entropy, 1991. It is at most −β log β − (1 − β) log(1 − β). Divided
by β, it tends to the forward KL as β → 0; divided by 1 − β, to the reverse KL as β → 1.

An outcome of probability 0 adds nothing and has a derivative of 0. One that has a probability in the first argument of
a KL and none in the second makes it infinite; `js` is always finite.

**From the log-probs of k ids** (`top_k_divergence`): all ids but the teacher's k most probable ones, the tail, are one
outcome, so both sides are distributions over k + 1 outcomes, and their divergence is a bound of the exact one:

- From below. Merging outcomes never raises an f-divergence (the data-processing inequality: Csiszár and Shields,
  Information Theory and Statistics: A Tutorial, 2004, lemma 4.1). It is equality if p / q is the same for all ids of
  the tail, so also if k is the size of the vocabulary or one less.
- From above. A KL has no bound: one id of the tail to which the second distribution gives almost nothing makes the
  exact one as large as you like. `js_upper_bound` is one of the Jensen-Shannon divergence.

The gradient is that of the bound. It pulls the student's tail to the teacher's mass, but says nothing about how that
mass is spread over the ids of the tail.

**From the last hidden states** of two models in this process (`exact_divergence`), one tile of logits at a time: no
tensor is as wide as the vocabulary, except the gradient of the student's head. A first pass over the tiles finds the
log-partition functions (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018), a second sums the
terms, and the backward pass makes the tiles once more. With t the derivative of the terms by log q, that of their sum
by a logit of the student is ``t − q · Σ t``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corelm.errors import Problems, refuse
from corelm.kl.estimators import expected_log_ratio, must_agree, wide_dtype
from corelm.tensors.ragged import counted_positions, shape_of
from corelm.validate import invalid, number, one_of, positive, shown

Divergence = Literal["forward_kl", "reverse_kl", "js"]

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)

#: How far a sum of probabilities may be from 1. Engines round log-probs to float32, and some compute them in less.
_ROUNDING, _SHORT_ROUNDING = 1e-3, 0.05
#: Positions × vocabulary entries of a tile. On a CPU, 4 MiB of float32 stay in its cache; elsewhere 16 MiB. Six tiles
#: are held at a time.
_CPU_TILE, _TILE = (1024, 1024), (1024, 4096)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one kind of divergence, one for each outcome. Its methods record no gradients."""

    kind: Divergence
    beta: float = 0.5

    def __post_init__(self) -> None:
        one_of("kind", self.kind, DIVERGENCES)
        beta = number("beta", self.beta, 0.0, above=True)
        if not beta < 1.0:
            instead = "at 0 and 1 the divergence is 0: pass kind='forward_kl' or kind='reverse_kl'"
            raise invalid("beta", f"expected a number above 0 and below 1, got {shown(self.beta)}; {instead}")
        object.__setattr__(self, "beta", beta)

    @torch.no_grad()
    def slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return the derivative of each term by ``log_q``, the log-probs taken for independent numbers."""
        if self.kind == "forward_kl":
            return log_p.exp().neg_()
        if self.kind == "reverse_kl":
            return expected_log_ratio(log_q, log_p).add_(log_q.exp())
        return expected_log_ratio(log_q, self._mixture(log_p, log_q)).mul_(1.0 - self.beta)

    @property
    def known(self) -> float:
        """What is known of the sum of all slopes, because probabilities sum to 1. `sums` leaves it out."""
        return {"forward_kl": -1.0, "reverse_kl": 1.0, "js": 0.0}[self.kind]

    @torch.no_grad()
    def sums(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the sums of the terms and of the slopes over the last dimension."""
        if self.kind == "forward_kl":
            return expected_log_ratio(log_p, log_q).sum(-1), 0.0
        if self.kind == "reverse_kl":
            value = expected_log_ratio(log_q, log_p).sum(-1)
            return value, value
        log_m = self._mixture(log_p, log_q)
        student = expected_log_ratio(log_q, log_m).sum(-1) * (1.0 - self.beta)
        return expected_log_ratio(log_p, log_m).sum(-1) * self.beta + student, student

    def _mixture(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))


# From the log-probs of k ids ------------------------------------------------------------------------------------------


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

    It is a lower bound of the exact divergence: see `corelm.kl.divergences`. The gradient flows to the student's
    log-probs and tail.

    >>> teacher = TopLogProbs(torch.tensor([[0.5, 0.3]]).log(), torch.tensor([0.2]).log())
    >>> student = TopLogProbs(torch.tensor([[0.4, 0.4]]).log(), torch.tensor([0.2]).log())
    >>> top_k_divergence(teacher, student).tolist()  # 0.5 · log(0.5 / 0.4) + 0.3 · log(0.3 / 0.4)
    [0.0252...]

    Args:
        teacher: the distribution that is learned from. No gradient flows to it.
        student: log-probs of the same ids.
        kind: `forward_kl` is KL(teacher‖student), `reverse_kl` is KL(student‖teacher).
        beta: of `js`, above 0 and below 1: the weight of the teacher in the mixture.
        mask: bool ``[...]``. Where it is False, the result is 0.0 without a gradient, and nothing is checked.

    Returns:
        float32 ``[...]`` (float64 for float64 inputs), in nats. NaN where a log-prob is NaN; inf where the second
        distribution of a KL has no probability for something that the first one has.

    Raises:
        InvalidRequestError: shapes or types do not fit; the probabilities of a position do not sum to 1, by more than
            rounding; its ids are not the same on both sides, or one is there twice. `rows` lists the rows at fault.
    """
    terms = Terms(kind, beta)
    found: Tensor = _Sum.apply(*_outcomes(teacher, student, mask)[:2], terms)
    return found


def js_upper_bound(
    teacher: TopLogProbs, student: TopLogProbs, *, beta: float = 0.5, mask: Tensor | None = None
) -> Tensor:
    """Return an upper bound of the exact Jensen-Shannon divergence, of which `top_k_divergence` is the lower bound.

    The divergence is the mutual information of an outcome and of the side that it was drawn from. By the chain rule,
    merging the tail loses what its ids say about the side: at most the entropy of the side given the tail. The gap of
    the two bounds is at most log 2 times the mass of the tail in the mixture.

    Arguments, result and errors are those of `top_k_divergence`. The result carries no gradient.
    """
    terms = Terms("js", beta)
    with torch.no_grad():
        log_p, log_q, counts = _outcomes(teacher, student, mask)
        top, _ = terms.sums(log_p[..., :-1], log_q[..., :-1])
        p, q = log_p[..., -1].exp(), log_q[..., -1].exp()
        bound = top - terms.beta * math.log(terms.beta) * p - (1 - terms.beta) * math.log1p(-terms.beta) * q
        return torch.where(counts, bound, 0.0)


class _Sum(torch.autograd.Function):
    """The sum of the terms of all outcomes. Autograd through the terms would be NaN where a probability is 0."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, terms: Terms) -> Tensor:
        ctx.save_for_backward(log_p, log_q)
        ctx.terms = terms
        return terms.sums(log_p, log_q)[0]

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
    _check_top("teacher", teacher)
    _check_top("student", student)
    what = "teacher and student must have the same positions and ids"
    must_agree("student", what, teacher.log_probs.shape, student.log_probs.shape)
    counts = counted_positions(mask, student.tail)
    _check_ids(teacher, student, counts)
    dtype = wide_dtype(teacher.log_probs, teacher.tail, student.log_probs, student.tail)
    tables = (torch.cat([side.log_probs, side.tail[..., None]], -1) for side in (teacher, student))
    log_p, log_q = (each.to(counts.device, dtype).masked_fill(~counts[..., None], -torch.inf) for each in tables)
    _check_mass("teacher", log_p.detach(), counts, teacher.log_probs.dtype)
    _check_mass("student", log_q.detach(), counts, student.log_probs.dtype)
    # Add NaN instead of choosing it, which would hide it from the gradient.
    broken = (log_p.detach() + log_q.detach()).isnan().any(-1, keepdim=True)
    spoilt = torch.zeros_like(log_q[..., :1]).masked_fill(broken, torch.nan)
    return log_p.detach() + spoilt, log_q + spoilt, counts


def _check_top(name: str, side: Any) -> None:
    if not isinstance(side, TopLogProbs):
        raise invalid(name, f"expected a TopLogProbs, got {type(side).__name__}")
    shape = getattr(side.log_probs, "shape", torch.Size())
    if not shape or not shape[-1]:
        raise invalid(f"{name}.log_probs", f"expected [..., k] with k of at least 1, got {shape_of(side.log_probs)}")
    for field, expected in (("log_probs", shape), ("tail", shape[:-1]), ("ids", shape)):
        given, kind = getattr(side, field), "ids" if field == "ids" else "floats"
        if given is None and field == "ids":
            continue
        fits = isinstance(given, Tensor) and given.dtype != torch.bool and given.shape == expected
        if not fits or given.is_floating_point() is (kind == "ids"):
            raise invalid(f"{name}.{field}", f"expected {kind} of shape {list(expected)}, got {shape_of(given)}")


def _check_mass(name: str, table: Tensor, counts: Tensor, given: torch.dtype) -> None:
    """Refuse positions whose probabilities do not sum to 1: not log-probs, ids twice, or another tail."""
    mass = table.double().exp().sum(-1)
    bad = counts & ((mass - 1.0).abs() > (_ROUNDING if given.itemsize >= 4 else _SHORT_ROUNDING))
    _refuse_at(bad, name, "the probabilities of the k ids and of the tail sum to {:.6g}, not to 1", mass)


def _check_ids(teacher: TopLogProbs, student: TopLogProbs, counts: Tensor) -> None:
    for name, ids in (("teacher", teacher.ids), ("student", student.ids)):
        if ids is not None:
            ordered = ids.sort(-1).values
            twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
            _refuse_at(twice.to(counts.device) & counts, f"{name}.ids", "an id is there twice")
    if teacher.ids is not None and student.ids is not None:
        differ = (student.ids.to(counts.device) != teacher.ids.to(counts.device)).any(-1)
        what = "the ids are not the teacher's; score the student at the teacher's ids, in their order"
        _refuse_at(differ & counts, "student.ids", what)


def _refuse_at(bad: Tensor, field: str, what: str, values: Tensor | None = None) -> None:
    """Raise for the first bad position of each row. The last dimension is the position, those before it the row.

    `what` may name the value at the position, one of `values`.
    """
    problems: Problems = {}
    width = bad.shape[-1] if bad.ndim else 1
    for at in bad.flatten().nonzero().flatten().tolist():
        row, position = divmod(at, width)
        said = what if values is None else what.format(float(values.flatten()[at]))
        problems.setdefault(row, f"position {position}: {said}" if bad.ndim else said)
    if problems and bad.ndim < 2:
        raise invalid(field, problems[0])
    refuse(problems, field)


# From the last hidden states ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OutputHead:
    """The last layer of a model: its logits are ``scale · (hidden · weightᵀ + bias)``.

    With a cap they are ``cap · tanh(logits / cap)`` of those. The weight is cast to the dtype of the hidden states, a
    tile at a time.

    Attributes:
        weight: float ``[vocab, hidden]``: ``model.get_output_embeddings().weight`` in transformers.
        bias: float ``[vocab]``, or None.
        scale: 1.0 for most models.
        cap: above 0; None for most models.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None


def exact_divergence(
    teacher_hidden: Tensor,
    teacher_head: OutputHead,
    student_hidden: Tensor,
    student_head: OutputHead,
    kind: Divergence = "forward_kl",
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the divergence of two models' next-token distributions at each position, summed over the vocabulary.

    Gradients flow to the student's hidden states and head, in their dtypes, but not gradients of gradients; none flow
    to the teacher. In addition to these, the call takes some 30 MiB on a CPU, however large the vocabulary and however
    many the positions. See `top_k_divergence` for `kind` and `beta`.

    Args:
        teacher_hidden: float ``[..., hidden]``: what the teacher's head reads.
        teacher_head: of the same vocabulary as the student's, id for id. It may be on another device.
        student_hidden: float ``[..., hidden]``, the same positions; its width may differ from the teacher's.
        student_head: may be tied to the student's embeddings.
        temperature: what the logits of both are divided by.
        mask: bool ``[...]``. Only positions that count are computed; the result is 0.0 at the others.

    Returns:
        float32 ``[...]`` (float64 if the student's hidden states are), in nats. It is NaN where a logit is NaN or +inf.

    Raises:
        InvalidRequestError: shapes or types do not fit, or the vocabularies have different sizes.
    """
    terms = Terms(kind, beta)
    _check_head("teacher", teacher_hidden, teacher_head)
    _check_head("student", student_hidden, student_head)
    what = "teacher and student must have the same positions"
    must_agree("teacher_hidden", what, teacher_hidden.shape[:-1], student_hidden.shape[:-1])
    sizes = len(teacher_head.weight), len(student_head.weight)
    if sizes[0] != sizes[1]:
        raise invalid(
            "teacher_head",
            f"teacher and student must have one vocabulary; got {sizes[0]} and {sizes[1]} ids. If the larger head only "
            f"has rows in excess that no id uses, leave them out: OutputHead(weight[:{min(sizes)}])",
        )
    temperature = positive("temperature", temperature)
    counts = counted_positions(mask, student_hidden[..., 0])
    found: Tensor = _ExactDivergence.apply(
        teacher_hidden.detach()[counts.to(teacher_hidden.device)],
        _constant(teacher_head),
        student_hidden[counts],
        student_head.weight,
        student_head.bias,
        _constant(student_head),
        temperature,
        terms,
    )
    return found.new_zeros(counts.shape).masked_scatter(counts, found)


def _check_head(name: str, hidden: Any, head: Any) -> None:
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or not hidden.ndim or not hidden.shape[-1]:
        raise invalid(f"{name}_hidden", f"expected floats [..., hidden], got {shape_of(hidden)}")
    field = f"{name}_head"
    if not isinstance(head, OutputHead):
        raise invalid(field, f"expected an OutputHead, got {type(head).__name__}")
    weight, bias = head.weight, head.bias
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2 or not len(weight):
        raise invalid(field, f"weight: expected floats [vocab, hidden], got {shape_of(weight)}")
    if weight.shape[1] != hidden.shape[-1]:
        raise invalid(field, f"weight is for hidden states of {weight.shape[1]}; got states of {hidden.shape[-1]}")
    if weight.device != hidden.device:
        raise invalid(field, f"weight is on {weight.device} and {name}_hidden on {hidden.device}")
    if bias is not None and (not isinstance(bias, Tensor) or tuple(bias.shape) != (len(weight),)):
        raise invalid(field, f"bias: expected [{len(weight)}], got {shape_of(bias)}")
    number(f"{field}.scale", head.scale)
    if head.cap is not None:
        positive(f"{field}.cap", head.cap)


def _constant(head: OutputHead) -> OutputHead:
    bias = None if head.bias is None else head.bias.detach()
    return OutputHead(head.weight.detach(), bias, float(head.scale), head.cap)


def _blocks(size: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, size, step)]


def _tile(hidden: Tensor, head: OutputHead, temperature: float, entries: slice, like: Tensor) -> Tensor:
    """Return the logits over temperature, ``[positions, entries]``, in the dtype and on the device of `like`."""
    tile = (hidden @ head.weight[entries].to(hidden.dtype).T).to(like)
    if head.bias is not None:
        tile.add_(head.bias[entries].to(like))
    if head.cap is not None:
        return tile.mul_(head.scale / head.cap).tanh_().mul_(head.cap / temperature)
    rate = head.scale / temperature
    return tile if rate == 1.0 else tile.mul_(rate)


def _log_partition(tiles: Iterable[Tensor], like: Tensor) -> Tensor:
    """Return the log-partition function of each row of the tiles, which are overwritten. `like` has a value a row."""
    total = torch.zeros_like(like)
    # Not minus infinity, which would turn a tile of minus infinities into NaN.
    largest = torch.full_like(like, torch.finfo(like.dtype).min)
    for tile in tiles:
        larger = torch.maximum(largest, tile.amax(1))
        added = tile.sub_(larger[:, None]).exp_().sum(1)
        total.mul_((largest - larger).exp()).add_(added)
        largest = larger
    return largest + total.log()


class _ExactDivergence(torch.autograd.Function):
    # Autocast is off: products have the dtype of the hidden states, and sums are not shortened.

    @staticmethod
    def forward(
        ctx: Any,
        teacher: Tensor,
        teacher_head: OutputHead,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: OutputHead,
        temperature: float,
        terms: Terms,
    ) -> Tensor:
        height, width = _CPU_TILE if hidden.device.type == "cpu" else _TILE
        positions, vocabulary = _blocks(len(hidden), height), _blocks(len(weight), width)
        # The divergence, the sum of the slopes, and both log-partition functions.
        found = hidden.new_zeros(4, len(hidden), dtype=wide_dtype(hidden))
        with torch.autocast(teacher.device.type, enabled=False), torch.autocast(hidden.device.type, enabled=False):
            for rows in positions:
                value, slope, log_p, log_q = found[:, rows]
                for into, states, of in ((log_p, teacher[rows], teacher_head), (log_q, hidden[rows], head)):
                    tiles = (_tile(states, of, temperature, entries, found) for entries in vocabulary)
                    into.copy_(_log_partition(tiles, into))
                for entries in vocabulary:
                    p = _tile(teacher[rows], teacher_head, temperature, entries, found).sub_(log_p[:, None])
                    q = _tile(hidden[rows], head, temperature, entries, found).sub_(log_q[:, None])
                    sums = terms.sums(p, q)
                    value.add_(sums[0])
                    slope.add_(sums[1])
                slope.add_(terms.known)
        # The teacher's head is saved to notice that it was changed in the meantime.
        ctx.save_for_backward(teacher, teacher_head.weight, teacher_head.bias, hidden, weight, bias, found)
        ctx.rest = teacher_head, head, temperature, terms, positions, vocabulary
        return found[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        teacher, _, _, hidden, weight, bias, found = ctx.saved_tensors
        teacher_head, head, temperature, terms, positions, vocabulary = ctx.rest
        _, slopes, log_p, log_q = found
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[2:5]
        by_hidden = torch.zeros_like(hidden, dtype=found.dtype) if wants_hidden else None
        by_weight = torch.empty_like(weight) if wants_weight else None
        by_bias = torch.empty_like(bias) if wants_bias else None
        with torch.autocast(teacher.device.type, enabled=False), torch.autocast(hidden.device.type, enabled=False):
            # Vocabulary in the outer loop: each sum over positions is then finished before the next, and rounded once.
            for entries in vocabulary:
                part = head.weight[entries].to(hidden.dtype)
                weight_sum, bias_sum = torch.zeros_like(part, dtype=found.dtype), found.new_zeros(len(part))
                for rows in positions:
                    p = _tile(teacher[rows], teacher_head, temperature, entries, found).sub_(log_p[rows, None])
                    logits = _tile(hidden[rows], head, temperature, entries, found)
                    of_cap = None if head.cap is None else 1.0 - (logits * (temperature / head.cap)).square_()
                    q = logits.sub_(log_q[rows, None])
                    slope = terms.slope(p, q)
                    weights = upstream[rows] * (head.scale / temperature)
                    slope.sub_(q.exp_().mul_(slopes[rows, None])).mul_(weights[:, None])
                    if of_cap is not None:
                        slope.mul_(of_cap)
                    if by_bias is not None:
                        bias_sum += slope.sum(0)
                    slope = slope.to(hidden.dtype)
                    if by_hidden is not None:
                        _add_product(by_hidden[rows], slope, part)
                    if by_weight is not None:
                        _add_product(weight_sum, slope.T, hidden[rows])
                if by_weight is not None:
                    by_weight[entries] = weight_sum
                if by_bias is not None:
                    by_bias[entries] = bias_sum
        by_hidden = None if by_hidden is None else by_hidden.to(hidden.dtype)
        return None, None, by_hidden, by_weight, by_bias, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Do ``total += left @ right`` in place. The sum stays in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
