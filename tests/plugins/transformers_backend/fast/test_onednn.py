"""Products computed by another library give the same logits, and the model is restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from corelm import Backend
from corelm.backend.seeds import answer_seeds
from helpers import oracle
from helpers.tiny_models import DEVICE, random_rows, tiny_model
from transformers_backend.fast import onednn
from transformers_backend.fast.onednn import quick_products

Open = Callable[..., Backend]
pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" or not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()),
    reason="no CPU with MKL and oneDNN",
)
#: About the smallest vocabulary for which the change pays at a hidden size of 64.
LARGE = 33_000


class Operators(TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().removesuffix(".default"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen2", "phi-biased", "granite"])
@pytest.mark.parametrize("rows", [1, 7, 65])
def test_the_logits_are_the_same(family: str, rows: int) -> None:
    model = tiny_model(family, vocab_size=LARGE)
    ids = torch.randint(LARGE, (rows, 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with quick_products(model):
            assert "forward" in vars(model.get_output_embeddings())
            found = model(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("rows", [1, 7, 65])
def test_large_layers_of_the_body_are_computed_too(rows: int) -> None:
    model = tiny_model("qwen2", hidden_size=512, intermediate_size=1024)
    # Not the last positions of a prompt only: a slice of the states is not contiguous.
    ids = torch.randint(model.vocab_size, (rows, 3), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = deepcopy(model).double()(input_ids=ids, logits_to_keep=1).logits
        plain = model(input_ids=ids, logits_to_keep=1).logits
        with quick_products(model):
            replaced = {name.rsplit(".")[-1] for name, part in model.named_modules() if "forward" in vars(part)}
            found = model(input_ids=ids, logits_to_keep=1).logits
    assert replaced >= {"gate_proj", "up_proj", "down_proj"}
    # oneDNN adds up in another order, and rounds up to three times as much.
    assert float((found - exact).abs().mean()) < 3 * float((plain - exact).abs().mean())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=3 * float((plain - exact).abs().max()))
    assert not any("forward" in vars(part) for part in model.modules())


class OtherTorch:
    """Stands for ``torch.ops.mkldnn`` of another PyTorch."""

    def __init__(self, product: Callable[..., object] | None) -> None:
        if product is not None:
            self._linear_pointwise = SimpleNamespace(default=product)


def other_arguments(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows @ weight.T


@pytest.fixture
def replace() -> Iterator[Callable[[OtherTorch], None]]:
    with pytest.MonkeyPatch.context() as patch:

        def replace(other: OtherTorch) -> None:
            patch.setattr(torch.ops, "mkldnn", other)
            onednn._operator.cache_clear()

        yield replace
    onednn._operator.cache_clear()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "other", [None, OtherTorch(None), OtherTorch(other_arguments), OtherTorch(lambda rows, *rest: rows * 2)]
)
def test_a_product_reads_slices_and_the_weights_of_now(
    biased: bool, other: OtherTorch | None, replace: Callable[[OtherTorch], None]
) -> None:
    if other is not None:
        replace(other)
    layer, states = nn.Linear(512, 1024, bias=biased), torch.randn(5, 7, 512)
    with torch.no_grad(), quick_products(layer):
        assert "forward" in vars(layer)
        layer.weight = nn.Parameter(torch.randn(1024, 512))
        for some in (states, states[:, -1:], states[:, 3], states[0, 0], states[:0], states.double()[:, -1].float()):
            expected = torch.nn.functional.linear(some, layer.weight, layer.bias)
            torch.testing.assert_close(layer(some), expected, rtol=0, atol=2e-4)


def test_the_operator_of_this_pytorch_is_used() -> None:
    """If this fails after an update of PyTorch, products are copied, which is slower."""
    assert onednn._is_right(onednn._direct) and onednn._operator() is onednn._direct


@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (3, 128), (600, 256)])
def test_a_product_is_by_onednn_if_it_is_large(rows: int, width: int) -> None:
    layer, states = nn.Linear(512, width), torch.randn(rows, 512)
    with torch.no_grad(), quick_products(layer), Operators() as called:
        layer(states)
    large = rows > 500 or width > 1000
    assert ("mkldnn::_linear_pointwise" in called.names) == large


def test_gradients_go_through_a_layer() -> None:
    layer, states = nn.Linear(512, 1024), torch.randn(3, 512)
    with torch.no_grad(), quick_products(layer):
        assert "forward" in vars(layer)
        with torch.enable_grad():
            layer(states).sum().backward()
    assert layer.weight.grad is not None and bool(layer.weight.grad.abs().sum() > 0)


def test_generation_with_it_does_not_depend_on_the_other_rows(open_model: Open) -> None:
    model, prompts, seeds = tiny_model(vocab_size=LARGE), random_rows(5, 30, 1, vocab=LARGE), answer_seeds(4, range(3))
    backend, sampling = open_model(model), {"max_new_tokens": 12, "ignore_eos": True}
    out = backend.generate(prompts, sampling, seeds=seeds)
    for row, (prompt, answer, found) in enumerate(zip(prompts, out.ids.tolist(), out.logprobs.split(), strict=True)):
        torch.testing.assert_close(found, oracle.answer_logprobs(model, prompt, answer), rtol=1e-6, atol=1e-5)
        assert backend.generate([prompt], sampling, seeds=seeds[row : row + 1]).ids.tolist() == [answer]


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    layer, states = nn.Linear(512, 1024), torch.randn(3, 512)
    with torch.no_grad(), quick_products(layer):
        copied = deepcopy(layer)
    with torch.no_grad():
        expected = copied(states)
        layer.weight.mul_(2)
        torch.testing.assert_close(copied(states), expected)
        copied.weight.zero_()
        torch.testing.assert_close(copied(states), copied.bias.expand(3, -1))


def test_another_forward_that_was_put_there_meanwhile_stays() -> None:
    layer = nn.Linear(512, 1024)
    with torch.no_grad(), quick_products(layer):
        vars(layer)["forward"] = own = lambda hidden: hidden
    assert vars(layer)["forward"] is own


@pytest.mark.parametrize("bias", [torch.randn(1024, 2)[:, 0], torch.full((1,), 0.1).expand(1024)])
def test_a_bias_that_does_not_lie_together(bias: torch.Tensor) -> None:
    layer, states = nn.Linear(512, 1024), torch.randn(3, 512)
    layer.bias = nn.Parameter(bias)
    with torch.no_grad(), quick_products(layer):
        assert "forward" in vars(layer)
        torch.testing.assert_close(
            layer(states), torch.nn.functional.linear(states, layer.weight, bias), rtol=0, atol=2e-5
        )


def test_the_model_is_restored_after_an_error() -> None:
    model = tiny_model(vocab_size=LARGE)
    with torch.no_grad(), pytest.raises(RuntimeError, match="on purpose"), quick_products(model):
        assert "forward" in vars(model.get_output_embeddings())
        raise RuntimeError("on purpose")
    assert "forward" not in vars(model.get_output_embeddings())


class OwnLinear(nn.Linear):
    """Computes something other than its weights say."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 2


def own_class(model: Any) -> None:
    head = OwnLinear(64, LARGE)
    model.set_output_embeddings(head)


def own_forward(model: Any) -> None:
    head = model.get_output_embeddings()
    head.forward = lambda hidden: nn.Linear.forward(head, hidden) * 2


@pytest.mark.parametrize("change", [own_class, own_forward, lambda model: model.bfloat16()])
def test_a_head_that_is_not_a_plain_float32_product_is_not_replaced(change: Callable[[Any], object]) -> None:
    model = tiny_model(vocab_size=LARGE)
    change(model)
    head = model.get_output_embeddings()
    before = vars(head).get("forward")
    with torch.no_grad(), quick_products(model):
        assert vars(head).get("forward") is before
    assert vars(head).get("forward") is before


def test_a_small_head_is_not_replaced() -> None:
    model = tiny_model()
    with torch.no_grad(), quick_products(model):
        assert "forward" not in vars(model.get_output_embeddings())


def test_hooks_of_the_head_see_its_logits(open_model: Open) -> None:
    model, seen = tiny_model(vocab_size=LARGE), []
    model.get_output_embeddings().register_forward_hook(lambda head, args, out: seen.append(tuple(out.shape)))
    backend = open_model(model)
    # The self-test comes before the first answer.
    backend.generate([[5, 6]], {"max_new_tokens": 3, "ignore_eos": True})
    seen.clear()
    backend.generate([[5, 6]], {"max_new_tokens": 3, "ignore_eos": True})
    assert seen == [(1, 1, LARGE)] * 3
