"""`MaskedCategorical`: next-token distributions with a mask of the positions that count. `log_probs`: a log-softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import Distribution, constraints

from corelm.errors import Problems, refuse
from corelm.tensors.ragged import shape_of
from corelm.validate import invalid

#: Returns values of logits[n, vocab] and ids[n, ...].
_Values = Callable[[Tensor, Tensor], Tensor]


def log_probs(logits: Tensor) -> Tensor:
    """Return the log-softmax of float[..., V] over its last dimension, in its dtype.

    On a CPU, `Tensor.log_softmax` in float32 is off by up to 4e-5 for V = 49,152: where one id has nearly all
    probability, the small exponentials of the others are lost one by one in a sum near 1. `logsumexp` adds in pairs.
    """
    return logits - logits.logsumexp(-1, keepdim=True)


class MaskedCategorical(Distribution):
    """A categorical distribution at each position of ``[*batch, time]``; only positions where `mask` is True count.

    At the other positions `log_prob` and `entropy` are 0.0 (without a gradient), and `mode` and `sample` are -100,
    which losses ignore. The logits there are never read.

    Where a position counts and its logits are no distribution (NaN, +inf, or −inf for every token), `log_prob` and
    `entropy` are NaN, and `mode` and `sample` raise an error.

    No tensor as large as the logits is made for a value: the logits are normalised a slice of positions at a time, and
    once more when a gradient is computed.

    Args:
        logits: float[*batch, time, vocab], unnormalised; −inf excludes a token. Gradients flow to them through
            `log_prob` and `entropy`.
        mask: bool[*batch, time].

    Raises:
        InvalidRequestError: the mask does not have the shape of the positions of the logits, or holds floats.
    """

    arg_constraints: ClassVar = {"logits": constraints.independent(constraints.real, 1)}
    IGNORED: ClassVar = -100
    #: Number of logits that are normalised at a time: 64 MiB of float32.
    SLICE: ClassVar = 2**24

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        if mask.shape != logits.shape[:-1] or mask.dtype.is_floating_point:
            wanted = f"bool{[*logits.shape[:-1]]} for logits {[*logits.shape]}"
            raise invalid("mask", f"expected {wanted}, got {shape_of(mask)}")
        self.logits = logits
        self.mask = mask.to(logits.device, torch.bool)
        super().__init__(batch_shape=mask.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return float32[*sample, *batch, time]: the log-probabilities of ids, in nats (float64 for float64 logits).

        Args:
            value: int64[*sample, *batch, time]: the ids. Where `mask` is False, they may be anything.

        Raises:
            InvalidRequestError: the ids have another shape or, where `mask` is True, are outside the vocabulary.
        """
        extra = value.ndim - self.mask.ndim
        if extra < 0 or value.shape[extra:] != self.mask.shape:
            wanted = f"ids [..., {', '.join(map(str, self.mask.shape))}]"
            raise invalid("value", f"expected {wanted}, got {list(value.shape)}")
        index = self._index
        ids = value.to(self.mask.device)[..., self.mask].reshape(math.prod(value.shape[:extra]), len(index))
        vocab = self.logits.shape[-1]
        if bool(((ids < 0) | (ids >= vocab)).any()):
            raise invalid("value", f"an id is outside the vocabulary of {vocab}")
        found = _BySlice.apply(self._rows, index, ids.T, self._step, _log_prob_of)
        return self._spread(found.T, 0.0).reshape(value.shape)

    def entropy(self) -> Tensor:
        """Return float32[*batch, time]: the entropies in nats (float64 for float64 logits)."""
        return self._spread(_BySlice.apply(self._rows, self._index, self._index, self._step, _entropy_of), 0.0)

    @property
    def mode(self) -> Tensor:
        """int64[*batch, time]: the most likely id.

        Raises:
            InvalidRequestError: logits are not a distribution; `rows` are the rows of the batch.
        """
        return self._spread(self._by_slice(lambda logits: logits.argmax(-1)), self.IGNORED)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Return int64[*sample_shape, *batch, time]: ids drawn with torch's generator.

        Raises:
            InvalidRequestError: logits are not a distribution; `rows` are the rows of the batch.
        """
        count = int(torch.Size(sample_shape).numel())
        drawn = self._by_slice(lambda logits: torch.multinomial(logits.softmax(-1), count, replacement=True), count)
        return self._spread(drawn.T, self.IGNORED).reshape(*sample_shape, *self.mask.shape)

    @property
    def _rows(self) -> Tensor:
        return self.logits.reshape(-1, self.logits.shape[-1])

    @property
    def _index(self) -> Tensor:
        """int64[n]: the positions that count."""
        return self.mask.flatten().nonzero().flatten()

    @property
    def _step(self) -> int:
        return max(1, self.SLICE // max(1, self.logits.shape[-1]))

    def _by_slice(self, pick: Callable[[Tensor], Tensor], *width: int) -> Tensor:
        """Return int64[n, *width]: the ids that `pick` chooses from the logits of the n positions that count."""
        index, width_of_row = self._index, self.mask.shape[-1] if self.mask.ndim else 1
        found = torch.empty((len(index), *width), dtype=torch.int64, device=self.logits.device)
        with torch.no_grad():
            for at, logits in _slices(self._rows, index, self._step) if found.numel() else ():
                # The largest logit is NaN if one is, and infinite if one is +inf or all are −inf.
                largest, problems = logits.amax(-1), Problems()
                bad = ~torch.isfinite(largest)
                for place, value in zip(index[at][bad].tolist(), largest[bad].tolist(), strict=True):
                    what = f"position {place % width_of_row} are not a distribution: the largest one is {value}"
                    problems.setdefault(place // width_of_row, f"the logits at {what}")
                refuse(problems, "logits")
                found[at] = pick(logits)
        return found

    def _spread(self, values: Tensor, filler: float) -> Tensor:
        """Spread ``[..., n]`` over ``[..., *batch, time]``, with `filler` where the mask is False."""
        shape = (*values.shape[:-1], *self.mask.shape)
        return values.new_full(shape, filler).masked_scatter(self.mask.expand(shape), values)


def _slices(rows: Tensor, index: Tensor, step: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows in `index`, `step` at a time, in float32 or more, each slice with its place in `index`."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    for start in range(0, len(index), step):
        at = slice(start, start + step)
        yield at, rows[index[at]].to(dtype)


class _BySlice(torch.autograd.Function):
    """Values of the rows that `index` names, computed a slice at a time, and once more for the gradient.

    Args:
        of: takes logits[slice, vocab] and ids[slice, samples], and returns a value, or one a sample, for each row.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, ids: Tensor, step: int, of: _Values) -> Tensor:
        ctx.save_for_backward(rows, index, ids)
        ctx.step, ctx.of = step, of
        found = [of(logits, ids[at]) for at, logits in _slices(rows, index, step)]
        return torch.cat(found) if found else of(rows[:0].to(torch.promote_types(rows.dtype, torch.float32)), ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, index, ids = ctx.saved_tensors
        out = torch.zeros_like(rows)
        for at, logits in _slices(rows, index, ctx.step):
            with torch.enable_grad():
                value = ctx.of(logits.requires_grad_(), ids[at])
            (slope,) = torch.autograd.grad(value, logits, grad[at])
            out[index[at]] = slope.to(rows.dtype)
        return out, None, None, None, None


def _log_prob_of(logits: Tensor, ids: Tensor) -> Tensor:
    total = logits.logsumexp(-1, keepdim=True)
    # +inf among the logits would give the other tokens log-prob −inf.
    return logits.gather(-1, ids) - total.masked_fill(total == torch.inf, torch.nan)


def _entropy_of(logits: Tensor, ids: Tensor) -> Tensor:
    values = log_probs(logits)
    # p log p is 0 where p is 0.
    return -(values.exp() * values.masked_fill(values == -torch.inf, 0.0)).sum(-1)
