"""Under autocast the head stays in tiles: its numbers and gradients are the model's own, and no logits are kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corelm import Backend
from helpers import oracle
from helpers.peft_models import with_lora
from helpers.plain_forward import Open, gradients
from helpers.scoring_path import scoring_path
from helpers.tiny_models import DEVICE, random_rows, tiny_model
from transformers_backend.fast.tiles import TiledHead

ROWS = random_rows(30, 2, 64, 9)


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(DEVICE, dtype=dtype)


def plain_logprobs(model: nn.Module, rows: list[list[int]]) -> Tensor:
    """Return float32: log-probs of all tokens but the first of each row, from the model's own logits."""
    parts = []
    for ids in rows:
        logits = oracle.own_logits(model, ids)[:-1].float()
        parts.append(logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(parts)


def assert_like_plain(backend: Backend, model: nn.Module, dtype: torch.dtype | None, short: torch.dtype) -> None:
    """Compare log-probs and gradients with those of the model's own forward under the same autocast."""
    with autocast(dtype):
        out = backend.score_logprobs(ROWS, grad=True)
        assert scoring_path(backend).head == "tiled"
        expected = plain_logprobs(model, ROWS)
    found = out.logprobs.values[out.scored.values]
    assert found.dtype == torch.float32
    # Sixteen steps of the largest logits, about 16: packed rows are summed in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=256 * torch.finfo(short).eps)
    assert float((found - expected).detach().abs().median()) <= 4 * torch.finfo(short).eps
    ours, wanted = (gradients(model, -each.mean()) for each in (found, expected))
    assert ours.keys() == wanted.keys()
    for name, gradient in ours.items():
        assert gradient.dtype == wanted[name].dtype
        assert float((gradient - wanted[name]).norm()) <= 16 * torch.finfo(short).eps * float(wanted[name].norm()), name


@pytest.mark.parametrize(
    ("family", "short"),
    [
        ("qwen2-tied", torch.bfloat16),
        ("gemma2", torch.bfloat16),
        ("cohere", torch.float16),
        ("phi-biased", torch.float16),
    ],
)
def test_numbers_and_gradients_are_those_of_the_model_under_autocast(
    open_model: Open, family: str, short: torch.dtype
) -> None:
    model = tiny_model(family, initializer_range=0.05)
    assert_like_plain(open_model(model), model, short, short)


def test_autocast_may_be_turned_on_and_off_between_calls(open_model: Open) -> None:
    model = tiny_model(initializer_range=0.05)
    backend = open_model(model)
    for short in (None, torch.bfloat16, torch.float16, None):
        with autocast(short):
            out = backend.score_logprobs(ROWS)
            assert scoring_path(backend).head == "tiled"
            with torch.no_grad():
                expected = plain_logprobs(model, ROWS)
        atol = 1e-5 if short is None else 256 * torch.finfo(short).eps
        torch.testing.assert_close(out.logprobs.values[out.scored.values], expected, rtol=0, atol=atol)


def test_an_adapter_on_the_body_keeps_the_tiles(open_model: Open) -> None:
    model = with_lora(tiny_model(initializer_range=0.05), "q_proj")
    assert_like_plain(open_model(model), model, torch.bfloat16, torch.bfloat16)


def test_a_model_prepared_by_accelerate_is_accepted_and_keeps_the_tiles(open_model: Open) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare_model(tiny_model("qwen2-tied", initializer_range=0.05))
    assert_like_plain(open_model(model), model, None, torch.bfloat16)


@pytest.mark.parametrize(("scale", "cap", "heat"), [(1.0, None, 1.0), (2.5, 8.0, 0.7)])
def test_tiles_cast_to_a_dtype_are_a_head_cast_to_it(scale: float, cap: float | None, heat: float) -> None:
    """Hidden states may be shorter than the weight, as accelerate hands them over."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1100, 24, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(3000, 24, generator=generator).requires_grad_()
    bias = torch.randn(3000, generator=generator).requires_grad_()
    tokens = torch.randint(3000, (1100,), generator=generator)
    head = TiledHead(weight, bias, scale, cap, torch.bfloat16)
    found = head.logprobs(hidden, tokens, heat)
    logits = scale * nn.functional.linear(hidden, weight.bfloat16(), bias.bfloat16()).float()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = (logits / heat).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert float((found - expected).detach().abs().median()) < 1e-3
    leaves = [hidden, weight, bias]
    wanted = torch.autograd.grad(expected.mean(), leaves)
    for leaf, ours, theirs in zip(leaves, torch.autograd.grad(found.mean(), leaves), wanted, strict=True):
        assert ours.dtype == leaf.dtype
        assert float((ours - theirs).float().norm()) <= 0.02 * float(theirs.float().norm())
