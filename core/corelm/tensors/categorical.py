"""`MaskedCategorical`: next-token distributions of which only some positions count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import Distribution, constraints

from corelm.errors import InvalidRequestError


class MaskedCategorical(Distribution):
    """A categorical distribution at each position of ``[*batch, time]``; positions outside `mask` count for nothing.

    Nothing as large as the logits is made or kept: they are normalised a slice of positions at a time, and once more
    when a gradient is asked for. Positions that do not count are never looked at, whatever stands there.

    Args:
        logits: float[*batch, time, vocab], unnormalised; −inf excludes a token. Gradients flow to them through
            `log_prob` and `entropy`.
        mask: bool[*batch, time].

    At a masked position `log_prob` and `entropy` are 0.0 (with no gradient) and `mode` and `sample` are -100, which
    losses ignore.

    Raises:
        InvalidRequestError: the mask does not cover the logits, or is no mask.
    """

    arg_constraints: ClassVar = {"logits": constraints.independent(constraints.real, 1)}
    IGNORED: ClassVar = -100
    #: Logits normalised at a time: 64 MiB of float32.
    SLICE: ClassVar = 2**24

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        if mask.shape != logits.shape[:-1] or mask.dtype.is_floating_point:
            raise InvalidRequestError(
                f"mask: expected bool{list(logits.shape[:-1])} for logits {list(logits.shape)}, "
                f"got {mask.dtype}{list(mask.shape)}",
                field="mask",
            )
        self.logits = logits
        self.mask = mask.to(logits.device, torch.bool)
        super().__init__(batch_shape=mask.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """float32[*sample, *batch, time]: log-probability of the ids ``value[*sample, *batch, time]``, in nats (float64
        of float64 logits). What ids stand at masked positions does not matter.

        Raises:
            InvalidRequestError: ids of another shape or, where they count, outside the vocabulary.
        """
        extra = value.ndim - self.mask.ndim
        if extra < 0 or value.shape[extra:] != self.mask.shape:
            raise InvalidRequestError(
                f"value: expected ids [..., {', '.join(map(str, self.mask.shape))}], got {list(value.shape)}",
                field="value",
            )
        ids = value.to(self.mask.device)[..., self.mask].reshape(math.prod(value.shape[:extra]), self._count)
        vocab = self.logits.shape[-1]
        if bool(((ids < 0) | (ids >= vocab)).any()):
            raise InvalidRequestError(f"value: an id is outside the vocabulary of {vocab}", field="value")
        found = _LogProb.apply(self._rows, self._index, ids.T, self._step)
        return self._spread(found.T, 0.0).reshape(value.shape)

    def entropy(self) -> Tensor:
        """float32[*batch, time], in nats (float64 of float64 logits)."""
        return self._spread(_Entropy.apply(self._rows, self._index, self._step), 0.0)

    @property
    def mode(self) -> Tensor:
        """int64[*batch, time]: the most likely id."""
        return self._spread(self._by_slice(lambda logits: logits.argmax(-1)), self.IGNORED)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """int64[*sample_shape, *batch, time], from torch's generator."""
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
    def _count(self) -> int:
        return int(self.mask.sum())

    @property
    def _step(self) -> int:
        return max(1, self.SLICE // max(1, self.logits.shape[-1]))

    def _by_slice(self, pick: Callable[[Tensor], Tensor], *width: int) -> Tensor:
        """int64[n, *width]: what `pick` makes of the logits of the positions that count."""
        found = torch.empty((self._count, *width), dtype=torch.int64, device=self.logits.device)
        with torch.no_grad():
            for at, logits in _slices(self._rows, self._index, self._step) if found.numel() else ():
                found[at] = pick(logits)
        return found

    def _spread(self, values: Tensor, filler: float) -> Tensor:
        """``[..., n]`` → ``[..., *batch, time]``"""
        shape = (*values.shape[:-1], *self.mask.shape)
        return values.new_full(shape, filler).masked_scatter(self.mask.expand(shape), values)


def _slices(rows: Tensor, index: Tensor, step: int) -> Iterator[tuple[slice, Tensor]]:
    """The rows of these numbers, at least float32, `step` at a time, and where in `index` they are."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    for start in range(0, len(index), step):
        at = slice(start, start + step)
        yield at, rows[index[at]].to(dtype)


class _LogProb(torch.autograd.Function):
    """Log-probabilities ``[n, samples]`` of ``ids[n, samples]`` in the rows of `index`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, ids: Tensor, step: int) -> Tensor:
        out = rows.new_empty(ids.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
        for at, logits in _slices(rows, index, step):
            out[at] = logits.gather(-1, ids[at]) - logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(rows, index, ids)
        ctx.step = step
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, index, ids = ctx.saved_tensors
        made = torch.zeros_like(rows)
        for at, logits in _slices(rows, index, ctx.step):
            slope = logits.softmax(-1).mul_(-grad[at].sum(-1, keepdim=True)).scatter_add_(-1, ids[at], grad[at])
            made[index[at]] = slope.to(rows.dtype)
        return made, None, None, None


class _Entropy(torch.autograd.Function):
    """Entropies ``[n]`` of the rows of `index`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, step: int) -> Tensor:
        out = rows.new_empty(index.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
        for at, logits in _slices(rows, index, step):
            _, surprise = _with_surprise(logits)
            out[at] = surprise.sum(-1)
        ctx.save_for_backward(rows, index, out)
        ctx.step = step
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows, index, entropy = ctx.saved_tensors
        made = torch.zeros_like(rows)
        for at, logits in _slices(rows, index, ctx.step):
            probs, surprise = _with_surprise(logits)
            # d H / d logit = −p (log p + H)
            slope = surprise.sub_(probs.mul_(entropy[at, None])).mul_(grad[at, None])
            made[index[at]] = slope.to(rows.dtype)
        return made, None, None


def _with_surprise(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities ``p`` and ``−p log p``, which is 0 where p is."""
    probs = logits.softmax(-1)
    return probs, torch.special.entr(probs)
