"""Log-probabilities by tiles are those of a plain head, with the same gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transformers_backend.fast.tiles import TiledHead


def plain(hidden: Tensor, weight: Tensor, bias: Any, tokens: Tensor, scale: float, cap: Any, heat: float) -> Tensor:
    logits = scale * (hidden @ weight.T + (0 if bias is None else bias))
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return (logits / heat).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def inputs(n: int, vocab: int, size: int, dtype: torch.dtype, bias: bool) -> tuple[list[Any], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, size), (vocab, size), (vocab,)][: 2 + bias]
    leaves = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    return leaves, torch.randint(vocab, (n,), generator=generator)


# The first case has more tokens and entries than a tile, and not a multiple of either.
@pytest.mark.parametrize(("n", "vocab"), [(1100, 2700), (1024, 1024), (1, 3), (0, 10)])
def test_tiles_are_log_softmax_and_its_gradients(n: int, vocab: int) -> None:
    forms = [(1.0, None, 1.0), (1.0, None, 0.7), (2.5, None, 1.0), (0.5, 8.0, 0.7)]
    for (scale, cap, heat), bias in zip(forms, [True, False, True, False], strict=True):
        leaves, tokens = inputs(n, vocab, 24, torch.float32, bias)
        out = TiledHead(leaves[1], leaves[2] if bias else None, scale, cap).logprobs(leaves[0], tokens, heat)
        upstream = torch.linspace(-1, 2, n)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        expected = plain(exact[0], exact[1], exact[2] if bias else None, tokens, scale, cap, heat)
        case = f"{bias=} {scale=} {cap=} {heat=}"
        # Some are below -100, where plain float32 is equally inexact.
        torch.testing.assert_close(out.double(), expected, rtol=5e-7, atol=1e-5, msg=lambda m, c=case: f"{c}: {m}")
        found = torch.autograd.grad(out, leaves, upstream)
        for gradient, wanted in zip(found, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
            torch.testing.assert_close(
                gradient.double(), wanted, rtol=1e-4, atol=1e-4, msg=lambda m, c=case: f"{c}: {m}"
            )


def test_the_argmax_is_that_of_all_logits_and_the_first_of_equal_ones() -> None:
    for (n, vocab), (cap, heat) in itertools.product([(1100, 5000), (3, 7), (0, 10)], [(None, 1.0), (8.0, 0.7)]):
        (hidden, weight), tokens = inputs(n, vocab, 24, torch.float32, False)
        # Small integers, so that products are exact. The second half repeats the first, in other tiles.
        hidden, weight = hidden.detach().round(), weight.detach().round()
        weight[vocab // 2 : vocab // 2 * 2] = weight[: vocab // 2].clone()
        head = TiledHead(weight, None, 1.0, cap)
        logprobs, _, argmax = head.logprobs_and_top(hidden, tokens, 0, heat, argmax=True)
        assert torch.equal(logprobs, head.logprobs(hidden, tokens, heat))
        logits = hidden @ weight.T
        expected = (logits if cap is None else cap * (logits / cap).tanh() / heat).argmax(-1)
        assert argmax is not None and torch.equal(argmax, expected), (n, vocab, cap)
        _, _, other = head.logprobs_and_top(hidden, tokens, min(5, vocab), heat, argmax=True)
        assert other is not None and torch.equal(other, expected), (n, vocab, cap)


def test_gradients_go_where_they_are_required_and_only_once() -> None:
    (hidden, weight), tokens = inputs(6, 9, 4, torch.float32, False)
    frozen = TiledHead(weight.detach(), None).logprobs(hidden, tokens)
    (alone,) = torch.autograd.grad(frozen.sum(), hidden)
    both = TiledHead(weight, None).logprobs(hidden, tokens)
    first, _ = torch.autograd.grad(both.sum(), [hidden, weight], retain_graph=True)
    torch.testing.assert_close(first, alone)
    (first,) = torch.autograd.grad(both.square().sum(), [hidden], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_weights_that_change_before_backward_are_an_error() -> None:
    (hidden, weight), tokens = inputs(6, 9, 4, torch.float32, False)
    out = TiledHead(weight, None).logprobs(hidden, tokens)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_entries_at_minus_infinity() -> None:
    """The first tiles are all minus infinity, and one chosen token is among them."""
    (hidden, weight), _ = inputs(2, 5000, 8, torch.float32, False)
    bias = torch.zeros(5000)
    bias[:4096] = -math.inf
    tokens = torch.tensor([4500, 3])
    found = TiledHead(weight.detach(), bias).logprobs(hidden.detach(), tokens)
    torch.testing.assert_close(found, plain(hidden.detach(), weight.detach(), bias, tokens, 1.0, None, 1.0))
    assert found[1] == -math.inf


def test_short_floats_are_summed_in_float32() -> None:
    leaves, tokens = inputs(1100, 3000, 64, torch.bfloat16, True)
    out = TiledHead(leaves[1], leaves[2]).logprobs(leaves[0], tokens)
    logits = nn.functional.linear(*leaves).float()
    expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert out.dtype == torch.float32
    # Only the products are rounded, as in the plain head.
    assert float((out - expected).detach().abs().median()) < 1e-3
    found = torch.autograd.grad(out.sum(), leaves)
    for gradient, wanted in zip(found, torch.autograd.grad(expected.sum(), leaves), strict=True):
        assert gradient.dtype == torch.bfloat16
        scale = float(wanted.float().abs().max())
        torch.testing.assert_close(gradient.float(), wanted.float(), rtol=0.02, atol=0.02 * scale)
