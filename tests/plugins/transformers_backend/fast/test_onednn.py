"""Products computed by another library give the same logits, and the model is restored afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from corelm import Backend
from corelm.backend.arguments import answer_seeds
from helpers.insides import choose_onednn_operator_again, use_onednn
from helpers.plain_forward import Open, assert_answers
from helpers.tiny_models import DEVICE, random_rows, tiny_model
from transformers_backend.fast import onednn

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" or not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()),
    reason="no CPU with MKL and oneDNN",
)
#: About the smallest vocabulary for which the change pays at a hidden size of 64.
LARGE = 33_000
PROMPTS, SAMPLING = random_rows(5, 30, 1, vocab=LARGE), {"max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(autouse=True)
def on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_onednn(monkeypatch, from_products=2**22)


class Operators(TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def by_onednn(backend: Backend, model: nn.Module, atol: float = 1e-5) -> bool:
    """Check answers, and return whether oneDNN made products of them."""
    with Operators() as called:
        made = backend.generate(PROMPTS, SAMPLING, seeds=[1, 2, 3])
    assert not any("forward" in vars(part) for part in model.modules() if type(part) is nn.Linear)
    assert_answers(made, model, PROMPTS, atol=atol)
    return "mkldnn::_linear_pointwise" in called.names


@pytest.mark.parametrize("family", ["phi-biased", "granite"])
def test_a_large_head_is_computed_by_onednn_with_the_weights_of_now(open_model: Open, family: str) -> None:
    model = tiny_model(family, vocab_size=LARGE, num_hidden_layers=1)
    backend = open_model(model)
    assert by_onednn(backend, model, 4e-5)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.5)
    assert by_onednn(backend, model, 4e-5)


def test_large_layers_of_the_body_are_computed_too(open_model: Open) -> None:
    model = tiny_model("qwen2", hidden_size=512, intermediate_size=1024, initializer_range=0.05)
    backend, prompts = open_model(model), random_rows(5, 30, 1)
    backend.generate(prompts, SAMPLING)
    with Operators() as called:
        made = backend.generate(prompts, SAMPLING)
    assert "mkldnn::_linear_pointwise" in called.names
    assert_answers(made, model, prompts)


class OwnLinear(nn.Linear):
    """Computes something other than its weights say."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 2


def own_class(model: Any) -> None:
    model.set_output_embeddings(OwnLinear(64, LARGE))


def own_forward(model: Any) -> None:
    head = model.get_output_embeddings()
    head.forward = lambda hidden: nn.Linear.forward(head, hidden) * 2


def strided_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.randn(LARGE, 2)[:, 0])


def expanded_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.full((1,), 0.1).expand(LARGE))


def test_other_heads_give_their_own_numbers(open_model: Open) -> None:
    for change in (own_class, own_forward, strided_bias, expanded_bias):
        model = tiny_model(vocab_size=LARGE, num_hidden_layers=1)
        change(model)
        forward = vars(model.get_output_embeddings()).get("forward")
        backend = open_model(model)
        made = backend.generate(PROMPTS, SAMPLING, seeds=[1, 2, 3])
        assert vars(model.get_output_embeddings()).get("forward") is forward, change.__name__
        assert_answers(made, model, PROMPTS, atol=2e-5)


@pytest.mark.parametrize(
    "product",
    [
        pytest.param(None, id="absent", marks=pytest.mark.nightly),
        pytest.param(lambda rows, weight: rows @ weight.T, id="other arguments", marks=pytest.mark.nightly),
        pytest.param(lambda rows, *rest: rows * 2, id="wrong"),
    ],
)
def test_an_operator_of_another_pytorch_is_not_used(
    open_model: Open, monkeypatch: pytest.MonkeyPatch, product: Callable[..., object] | None
) -> None:
    other = SimpleNamespace(**({} if product is None else {"_linear_pointwise": SimpleNamespace(default=product)}))
    model = tiny_model(vocab_size=LARGE, num_hidden_layers=1)
    monkeypatch.setattr(torch.ops, "mkldnn", other)
    choose_onednn_operator_again()
    try:
        by_onednn(open_model(model), model)
    finally:
        monkeypatch.undo()
        choose_onednn_operator_again()


@pytest.mark.parametrize(
    ("kind", "vendor", "quicker"),
    [
        ("AVX2", "GenuineIntel", True),
        ("AVX512", "AuthenticAMD", True),
        ("AVX512", "GenuineIntel", False),
        ("DEFAULT", "AuthenticAMD", False),
    ],
)
def test_the_cpu_says_whose_products_are_quicker(
    monkeypatch: pytest.MonkeyPatch, kind: str, vendor: str, quicker: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kind)
    monkeypatch.setattr(onednn, "cpu_vendor", lambda: vendor)
    assert math.isfinite(onednn._pays_from.__wrapped__()) == quicker


def test_answers_do_not_depend_on_the_other_rows_and_hooks_see_the_logits(open_model: Open) -> None:
    model, seeds, seen = tiny_model(vocab_size=LARGE), answer_seeds(4, range(3)), []
    model.get_output_embeddings().register_forward_hook(lambda head, args, out: seen.append(tuple(out.shape)))
    backend = open_model(model)
    out = backend.generate(PROMPTS, SAMPLING, seeds=seeds)
    plain = open_model(model, fast=False).generate(PROMPTS, SAMPLING, seeds=seeds)
    assert out.ids.tolist() == plain.ids.tolist()
    for row, (prompt, answer) in enumerate(zip(PROMPTS, out.ids.tolist(), strict=True)):
        # A length that is new is compared with the plain forward.
        for _ in range(2):
            seen.clear()
            assert backend.generate([prompt], SAMPLING, seeds=seeds[row : row + 1]).ids.tolist() == [answer]
        assert seen == [(1, 1, LARGE)] * 8


def test_the_model_is_restored_after_an_error(open_model: Open) -> None:
    model = tiny_model(vocab_size=LARGE, num_hidden_layers=1)
    backend = open_model(model)
    by_onednn(backend, model)

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("on purpose")

    handle = model.model.layers[0].register_forward_hook(fail)
    with pytest.raises(Exception, match="on purpose"):
        backend.generate(PROMPTS, SAMPLING)
    handle.remove()
    assert by_onednn(backend, model)
