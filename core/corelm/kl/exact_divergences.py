"""The exact divergence of two models in this process, from their last hidden states, one tile of logits at a time.

No tensor here is as wide as the vocabulary, except the gradient of the student's head itself. A tile is the product of
a block of hidden states and a range of the head's rows, once for the teacher and once for the student. A first pass
over the tiles finds the log-partition functions of both sides ("Online normalizer calculation for softmax", Milakov and
Gimelshein 2018, algorithm 3), a second one sums the terms of `divergence_terms`, and the backward pass makes the tiles
once more. With t the derivative of the terms by the student's log-probs, log q, the derivative of their sum by a logit
of the student is ``t − q · Σ t``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corelm.kl.divergence_terms import Divergence, Terms
from corelm.kl.estimators import counted_positions
from corelm.validate import invalid, number, positive

#: Positions × vocabulary entries of a tile. On a CPU, 4 MiB of float32 stay in its cache; elsewhere 16 MiB. Six tiles
#: are held at a time.
_CPU_TILE, _TILE = (1024, 1024), (1024, 4096)


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
    to the teacher. Only the arguments and three numbers a position are kept for them. In addition to the gradients, the
    call takes some 30 MiB on a CPU, however large the vocabulary and however many the positions.

    Args:
        teacher_hidden: float ``[..., hidden]``: what the teacher's head reads.
        teacher_head: of the same vocabulary as the student's, id for id. It may be on another device.
        student_hidden: float ``[..., hidden]``, the same positions; its width may differ from the teacher's.
        student_head: may be tied to the student's embeddings.
        kind: as in `top_k_divergence`.
        beta: as in `top_k_divergence`.
        temperature: what the logits of both are divided by.
        mask: bool ``[...]``. Only positions that count are computed; the result is 0.0 at the others.

    Returns:
        float32 ``[...]`` (float64 if the student's hidden states are), in nats. It is NaN where a logit is NaN or +inf.

    Raises:
        InvalidRequestError: shapes or types do not fit, or the vocabularies have different sizes.
    """
    terms = Terms.checked(kind, beta)
    for name, hidden, head in (
        ("teacher", teacher_hidden, teacher_head),
        ("student", student_hidden, student_head),
    ):
        _check(name, hidden, head)
    if teacher_hidden.shape[:-1] != student_hidden.shape[:-1]:
        raise invalid(
            "teacher_hidden",
            "teacher and student must have the same positions; got shapes "
            f"{tuple(teacher_hidden.shape)} and {tuple(student_hidden.shape)}",
        )
    sizes = len(teacher_head.weight), len(student_head.weight)
    if sizes[0] != sizes[1]:
        raise invalid(
            "teacher_head",
            f"teacher and student must have one vocabulary; got {sizes[0]} and {sizes[1]} ids. If the larger head only "
            f"has rows in excess that no id uses, leave them out: OutputHead(weight[:{min(sizes)}])",
        )
    temperature = positive("temperature", temperature)
    counts = counted_positions(mask, student_hidden[..., 0])
    where = counts.to(teacher_hidden.device)
    found: Tensor = _ExactDivergence.apply(
        teacher_hidden.detach()[where],
        _Side.of(teacher_head, temperature),
        student_hidden[counts],
        student_head.weight,
        student_head.bias,
        _Side.of(student_head, temperature),
        terms,
    )
    return found.new_zeros(counts.shape).masked_scatter(counts, found)


@dataclass(frozen=True, eq=False)
class _Side:
    """A head whose tensors carry no gradients, and a temperature."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    cap: float | None
    temperature: float

    @classmethod
    def of(cls, head: OutputHead, temperature: float) -> _Side:
        bias = None if head.bias is None else head.bias.detach()
        return cls(head.weight.detach(), bias, float(head.scale), head.cap, temperature)

    @property
    def rate(self) -> float:
        """The constant factor in the derivative of a logit over temperature by a bare product."""
        return self.scale / self.temperature


class _LogitTiles:
    """Makes the logits over temperature of one side, tile by tile, in one buffer."""

    def __init__(self, hidden: Tensor, side: _Side, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden, self._side, self._dtype, self._device = hidden, side, dtype, device
        self._product = hidden.new_empty(size)

    def part(self, entries: slice) -> Tensor:
        """Return these rows of the weight in the dtype of the product."""
        return self._side.weight[entries].to(self._hidden.dtype)

    def __call__(self, rows: slice, entries: slice) -> Tensor:
        """Return ``[rows, entries]``, in the dtype and on the device of the sums. The next call overwrites them."""
        side, hidden, weight = self._side, self._hidden[rows], self.part(entries)
        out = self._product[: len(hidden) * len(weight)].view(len(hidden), len(weight))
        torch.mm(hidden, weight.T, out=out)
        tile = out.to(self._device, self._dtype)
        if side.bias is not None:
            tile.add_(side.bias[entries].to(self._device, self._dtype))
        if side.cap is not None:
            return tile.mul_(side.scale / side.cap).tanh_().mul_(side.cap / side.temperature)
        return tile if side.rate == 1.0 else tile.mul_(side.rate)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of the cap at these logits over temperature; None if there is no cap."""
        side = self._side
        return None if side.cap is None else 1.0 - (logits * (side.temperature / side.cap)).square_()


class _Normalizer:
    """The log-partition function of each row, tile by tile."""

    def __init__(self, rows: int, like: Tensor) -> None:
        self._total = like.new_zeros(rows)
        # Not minus infinity, which would turn a tile of minus infinities into NaN.
        self._largest = like.new_full((rows,), torch.finfo(like.dtype).min)

    def add_(self, tile: Tensor) -> None:
        """Take in a tile of logits, which is overwritten."""
        larger = torch.maximum(self._largest, tile.amax(1))
        added = tile.sub_(larger[:, None]).exp_().sum(1)
        self._total.mul_((self._largest - larger).exp()).add_(added)
        self._largest = larger

    @property
    def log(self) -> Tensor:
        return self._largest + self._total.log()


class _Pair:
    """The tiles of both sides."""

    def __init__(self, teacher: tuple[Tensor, _Side], student: tuple[Tensor, _Side]) -> None:
        hidden, side = student
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self._positions, self._vocab = len(hidden), len(side.weight)
        height, width = _CPU_TILE if hidden.device.type == "cpu" else _TILE
        self._height, self._width = max(1, min(height, self._positions)), min(width, self._vocab)
        size = self._height * self._width
        self.teacher, self.student = (_LogitTiles(*one, size, self.dtype, hidden.device) for one in (teacher, student))

    def rows(self) -> Iterator[slice]:
        return (slice(start, start + self._height) for start in range(0, self._positions, self._height))

    def entries(self) -> Iterator[slice]:
        return (slice(start, start + self._width) for start in range(0, self._vocab, self._width))


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _plainly(method: _Method) -> _Method:
    """Turn off autocast: the dtypes of products are those of the hidden states, and sums are not to be shortened."""

    @functools.wraps(method)
    def run(ctx: Any, *args: Any) -> Any:
        tensor = next(one for one in args if isinstance(one, Tensor))
        with torch.autocast(tensor.device.type, enabled=False):
            return method(ctx, *args)

    return cast(_Method, run)


class _ExactDivergence(torch.autograd.Function):
    @staticmethod
    @_plainly
    def forward(
        ctx: Any,
        teacher: Tensor,
        teacher_side: _Side,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        side: _Side,
        terms: Terms,
    ) -> Tensor:
        pair = _Pair((teacher, teacher_side), (hidden, side))
        # The divergence, the sum of the slopes, and both log-partition functions.
        found = hidden.new_zeros(4, len(hidden), dtype=pair.dtype)
        for rows in pair.rows():
            value, slope, log_p, log_q = found[:, rows]
            for tiles, into in ((pair.teacher, log_p), (pair.student, log_q)):
                normalizer = _Normalizer(len(into), into)
                for entries in pair.entries():
                    normalizer.add_(tiles(rows, entries))
                into.copy_(normalizer.log)
            for entries in pair.entries():
                p = pair.teacher(rows, entries).sub_(log_p[:, None])
                q = pair.student(rows, entries).sub_(log_q[:, None])
                of_tile = terms.sums(p, q)
                value.add_(of_tile[0])
                slope.add_(of_tile[1])
            slope.add_(terms.known)
        ctx.save_for_backward(teacher, teacher_side.weight, teacher_side.bias, hidden, weight, bias, found)
        ctx.teacher_side, ctx.side, ctx.terms = teacher_side, side, terms
        return found[0].clone()

    @staticmethod
    @once_differentiable
    @_plainly
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        teacher, _, _, hidden, weight, bias, (_, slopes, log_p, log_q) = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[2:5]
        pair = _Pair((teacher, ctx.teacher_side), (hidden, ctx.side))
        by_hidden = torch.zeros_like(hidden, dtype=pair.dtype) if wants_hidden else None
        by_weight = torch.empty_like(weight) if wants_weight else None
        by_bias = torch.empty_like(bias) if wants_bias else None
        # Vocabulary in the outer loop: each sum over positions is then finished before the next, and rounded once.
        for entries in pair.entries():
            part = pair.student.part(entries)
            weight_sum = torch.zeros_like(part, dtype=pair.dtype) if wants_weight else None
            bias_sum = torch.zeros(len(part), dtype=pair.dtype, device=part.device) if wants_bias else None
            for rows in pair.rows():
                p = pair.teacher(rows, entries).sub_(log_p[rows, None])
                logits = pair.student(rows, entries)
                cap = pair.student.slope(logits)
                q = logits.sub_(log_q[rows, None])
                slope = ctx.terms.slope(p, q)
                slope.sub_(q.exp_().mul_(slopes[rows, None])).mul_((upstream[rows] * ctx.side.rate)[:, None])
                if cap is not None:
                    slope.mul_(cap)
                if bias_sum is not None:
                    bias_sum += slope.sum(0)
                slope = slope.to(hidden.dtype)
                if by_hidden is not None:
                    _add_product(by_hidden[rows], slope, part)
                if weight_sum is not None:
                    _add_product(weight_sum, slope.T, hidden[rows])
            if by_weight is not None and weight_sum is not None:
                by_weight[entries] = weight_sum
            if by_bias is not None and bias_sum is not None:
                by_bias[entries] = bias_sum
        by_hidden = None if by_hidden is None else by_hidden.to(hidden.dtype)
        return None, None, by_hidden, by_weight, by_bias, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Do ``total += left @ right`` in place. The sum stays in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


# Checks ---------------------------------------------------------------------------------------------------------------


def _check(name: str, hidden: Any, head: Any) -> None:
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or 0 in hidden.shape[-1:] or not hidden.ndim:
        found = f"{hidden.dtype}{list(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
        raise invalid(f"{name}_hidden", f"expected floats [..., hidden], got {found}")
    field = f"{name}_head"
    if not isinstance(head, OutputHead):
        raise invalid(field, f"expected an OutputHead, got {type(head).__name__}")
    weight, bias = head.weight, head.bias
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2 or not len(weight):
        found = f"{weight.dtype}{list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise invalid(field, f"weight: expected floats [vocab, hidden], got {found}")
    if weight.shape[1] != hidden.shape[-1]:
        raise invalid(field, f"weight is for hidden states of {weight.shape[1]}; got states of {hidden.shape[-1]}")
    if weight.device != hidden.device:
        raise invalid(field, f"weight is on {weight.device} and {name}_hidden on {hidden.device}")
    if bias is not None and (not isinstance(bias, Tensor) or tuple(bias.shape) != (len(weight),)):
        found = str(list(bias.shape)) if isinstance(bias, Tensor) else type(bias).__name__
        raise invalid(field, f"bias: expected [{len(weight)}], got {found}")
    number(f"{field}.scale", head.scale)
    if head.cap is not None:
        positive(f"{field}.cap", head.cap)
