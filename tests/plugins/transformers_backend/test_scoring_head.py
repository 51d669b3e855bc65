"""The head in tiles: right for every kind of head, small, and left alone where a head is more than a matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2ForCausalLM

from corelm import Backend
from helpers import oracle
from helpers.tiny_models import random_rows, tiny_model
from transformers_backend.tiles import LinearHead

Open = Callable[..., Backend]
ROWS = random_rows(30, 2, 64, 9)


def plain(hidden: Tensor, weight: Tensor, bias: Any, tokens: Tensor, scale: float, cap: Any, heat: float) -> Tensor:
    logits = scale * (hidden @ weight.T + (0 if bias is None else bias))
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return (logits / heat).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def inputs(n: int, vocab: int, size: int, dtype: torch.dtype, bias: bool) -> tuple[list[Any], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, size), (vocab, size), (vocab,)][: 2 + bias]
    leaves = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    return leaves, torch.randint(vocab, (n,), generator=generator)


# More tokens and entries than a tile holds, and not a multiple of either.
@pytest.mark.parametrize(("n", "vocab"), [(1100, 5000), (1024, 1024), (1, 3), (0, 10)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("scale", "cap", "heat"), [(1.0, None, 1.0), (1.0, None, 0.7), (2.5, None, 1.0), (0.5, 8.0, 0.7)]
)
def test_tiles_are_log_softmax_and_its_gradients(
    n: int, vocab: int, bias: bool, scale: float, cap: float | None, heat: float
) -> None:
    leaves, tokens = inputs(n, vocab, 24, torch.float32, bias)
    out = LinearHead(leaves[1], leaves[2] if bias else None, scale, cap).logprobs(leaves[0], tokens, heat)
    upstream = torch.linspace(-1, 2, n)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = plain(exact[0], exact[1], exact[2] if bias else None, tokens, scale, cap, heat)
    # Some are below -100, where plain float32 is as far off.
    torch.testing.assert_close(out.double(), expected, rtol=5e-7, atol=1e-5)
    found = torch.autograd.grad(out, leaves, upstream)
    for gradient, wanted in zip(found, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(bias: bool, cap: float | None) -> None:
    leaves, tokens = inputs(5, 7, 4, torch.float64, bias)
    call = lambda hidden, weight, bias=None: LinearHead(weight, bias, 1.7, cap).logprobs(hidden, tokens, 0.6)  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves)


def test_only_what_requires_gradients_gets_them_and_only_once() -> None:
    (hidden, weight), tokens = inputs(6, 9, 4, torch.float32, False)
    frozen = LinearHead(weight.detach(), None).logprobs(hidden, tokens)
    (alone,) = torch.autograd.grad(frozen.sum(), hidden)
    both = LinearHead(weight, None).logprobs(hidden, tokens)
    first, _ = torch.autograd.grad(both.sum(), [hidden, weight], retain_graph=True)
    torch.testing.assert_close(first, alone)
    (first,) = torch.autograd.grad(both.square().sum(), [hidden], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_weights_that_change_before_backward_are_an_error() -> None:
    (hidden, weight), tokens = inputs(6, 9, 4, torch.float32, False)
    out = LinearHead(weight, None).logprobs(hidden, tokens)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_entries_that_are_ruled_out_do_no_harm() -> None:
    """A whole tile of minus infinity comes first, and a chosen token may be one of it."""
    (hidden, weight), _ = inputs(2, 5000, 8, torch.float32, False)
    bias = torch.zeros(5000)
    bias[:4096] = -math.inf
    tokens = torch.tensor([4500, 3])
    found = LinearHead(weight.detach(), bias).logprobs(hidden.detach(), tokens)
    torch.testing.assert_close(found, plain(hidden.detach(), weight.detach(), bias, tokens, 1.0, None, 1.0))
    assert found[1] == -math.inf


def test_short_floats_are_summed_in_float32() -> None:
    leaves, tokens = inputs(1100, 3000, 64, torch.bfloat16, True)
    out = LinearHead(leaves[1], leaves[2]).logprobs(leaves[0], tokens)
    logits = nn.functional.linear(*leaves).float()
    expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert out.dtype == torch.float32
    # The products are rounded as the plain head rounds them; what comes after is not.
    assert float((out - expected).detach().abs().median()) < 1e-3
    found = torch.autograd.grad(out.sum(), leaves)
    for gradient, wanted in zip(found, torch.autograd.grad(expected.sum(), leaves), strict=True):
        assert gradient.dtype == torch.bfloat16
        scale = float(wanted.float().abs().max())
        torch.testing.assert_close(gradient.float(), wanted.float(), rtol=0.02, atol=0.02 * scale)


class Largest(TorchDispatchMode):
    """Notes the most elements that any operation's result has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return out


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_is_as_large_as_the_logits(open_model: Open, grad: bool) -> None:
    model = tiny_model(vocab_size=20_000, num_hidden_layers=1)
    backend, rows = open_model(model), random_rows(*[300] * 5, vocab=20_000)
    backend.score_logprobs(rows[:1])
    with Largest() as largest:
        out = backend.score_logprobs(rows, grad=grad)
        if grad:
            out.logprobs.values.sum().backward()
    # The tile, or the weights themselves.
    assert largest.elements <= max(1024 * 1024, 20_000 * 64) < 1495 * 20_000 / 10
    if not grad:
        torch.testing.assert_close(out.logprobs.split()[3], oracle.logprobs(model, rows[3]), rtol=0, atol=1e-5)


# Where the head is more -----------------------------------------------------------------------------------------------


def way(backend: Backend) -> str:
    """How the head's part of the latest call was computed."""
    taken: str = backend.engine.plugin.scorer.taken.head
    return taken


def scores_are_right(backend: Backend, model: nn.Module) -> bool:
    found = backend.score_logprobs(ROWS).logprobs.split()
    return all(
        torch.allclose(one, oracle.logprobs(model, ids), rtol=0, atol=1e-5)
        for ids, one in zip(ROWS, found, strict=True)
    )


def test_a_hook_on_the_head_is_called_while_it_is_there(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    assert scores_are_right(backend, model) and way(backend) == "tiled"
    handle = model.get_output_embeddings().register_forward_hook(lambda module, args, out: out * 1.5)
    assert scores_are_right(backend, model) and way(backend) == "sliced"
    handle.remove()
    assert scores_are_right(backend, model) and way(backend) == "tiled"


def test_a_hook_on_the_model_is_noticed(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    assert scores_are_right(backend, model) and way(backend) == "tiled"

    def double(module: Any, args: Any, out: Any) -> Any:
        out.logits = out.logits.tanh()
        return out

    model.register_forward_hook(double)
    assert scores_are_right(backend, model) and way(backend) == "sliced"


def test_an_adapter_on_the_head_is_heard(open_model: Open) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model(), config).eval()
    backend = open_model(model)
    assert scores_are_right(backend, model) and way(backend) == "sliced"


def test_an_adapter_on_the_body_alone_leaves_the_head_to_tiles(open_model: Open) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model(), config).eval()
    backend = open_model(model)
    assert scores_are_right(backend, model) and way(backend) == "tiled"


def test_under_autocast_the_models_own_forward_decides(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = backend.score_logprobs(ROWS)
        assert way(backend) == "sliced"
        expected = oracle.logprobs(model, ROWS[0])
    torch.testing.assert_close(out.logprobs.split()[0], expected, rtol=0, atol=0.15)
    assert scores_are_right(backend, model) and way(backend) == "tiled"


def test_logits_are_made_where_they_are_asked_for(open_model: Open) -> None:
    backend = open_model(tiny_model())
    backend.score_logprobs(ROWS, return_logits=True)
    assert way(backend) == "sliced"


@pytest.mark.parametrize("family", ["granite", "gemma2"])
def test_a_head_of_zeros_says_nothing_until_it_has_weights(open_model: Open, family: str) -> None:
    model, new = tiny_model(family), tiny_model(family, seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    backend = open_model(model)
    backend.score_logprobs(ROWS)
    assert way(backend) == "sliced"
    backend.update_weights(new.state_dict())
    assert scores_are_right(backend, new) and way(backend) == "tiled"


def test_entries_that_the_model_rules_out_are_no_matrix_product(open_model: Open) -> None:
    model = tiny_model()
    forward = model.forward

    def ruling_out(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits.index_fill(-1, torch.arange(8), -1e4)
        return out

    model.forward = ruling_out
    backend = open_model(model)
    assert scores_are_right(backend, model) and way(backend) == "sliced"


def test_a_large_head_is_asked_itself_where_trying_it_would_cost_more(open_model: Open) -> None:
    model = tiny_model("cohere", vocab_size=40_000, num_hidden_layers=1, initializer_range=0.05)
    backend = open_model(model)
    few, many = (random_rows(*lengths, vocab=40_000) for lengths in ((30, 12), (30, 64, 9)))
    # The second time a formula that was found is wrong, and it shows on the ids that are looked at.
    for model.logit_scale in (2.0, 3.0):
        for rows, expected in ((few, "sliced"), (many, "tiled")):
            found = backend.score_logprobs(rows).logprobs.split()
            assert way(backend) == expected
            for ids, one in zip(rows, found, strict=True):
                torch.testing.assert_close(one, oracle.logprobs(model, ids), rtol=0, atol=1e-5)
    backend.score_logprobs(few, grad=True)
    assert way(backend) == "tiled", "gradients would keep the logits"


@pytest.mark.parametrize("family", ["cohere", "gemma2"])
def test_short_floats_of_a_scaled_head_are_not_rounded_in_two_ways(open_model: Open, family: str) -> None:
    """Few positions and many, with gradients and without: one log-prob. Otherwise ratios of a policy to itself are
    not 1.
    """
    heads = {"cohere": {"logit_scale": 1.625}, "gemma2": {"final_logit_softcapping": 30.0}}
    model = tiny_model(family, vocab_size=40_000, num_hidden_layers=1, **heads[family]).to(torch.bfloat16)
    backend, (ids,) = open_model(model), random_rows(100, vocab=40_000)
    found = backend.score_logprobs([ids]).logprobs.values
    assert way(backend) == "tiled"
    torch.testing.assert_close(backend.score_logprobs([ids], grad=True).logprobs.values.detach(), found)
    few = backend.score_logprobs([ids], score_from=60).logprobs.values
    torch.testing.assert_close(few[60:], found[60:])


class Shifted(Qwen2ForCausalLM):
    """Something is added to its logits that is no part of the head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("shift", torch.zeros(config.vocab_size))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.shift
        return output


@pytest.mark.parametrize("shift", [8.0, -torch.inf])
@pytest.mark.parametrize("one", [4000, 4001])
def test_a_change_of_one_id_is_noticed(open_model: Open, one: int, shift: float) -> None:
    model = Shifted(tiny_model(vocab_size=20_000, num_hidden_layers=1).config).eval()
    backend, rows = open_model(model), random_rows(40, 50, vocab=20_000)
    assert one not in rows[0] + rows[1]
    for added, expected in ((0.0, "tiled"), (shift, "sliced")):
        model.shift[one] = added
        for ids, found in zip(rows, backend.score_logprobs(rows).logprobs.split(), strict=True):
            torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-5)
        assert way(backend) == expected


def test_weights_that_are_written_to_are_followed(open_model: Open) -> None:
    model = tiny_model("cohere", vocab_size=20_000, num_hidden_layers=1, initializer_range=0.05)
    backend, rows = open_model(model), random_rows(40, 50, vocab=20_000)
    head = model.get_output_embeddings().weight
    for row, factor in ((slice(None), 2.0), (4001, 3.0), (slice(None), 0.5)):
        # By `.data` no counter says that they have changed. The scale goes the other way: the logits stay nearly.
        head.data[row] *= factor
        model.logit_scale /= factor
        for ids, one in zip(rows, backend.score_logprobs(rows).logprobs.split(), strict=True):
            torch.testing.assert_close(one, oracle.logprobs(model, ids), rtol=0, atol=1e-5)
        assert way(backend) == "tiled"
