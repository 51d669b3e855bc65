"""How often a head is tried: once, as long as nothing that its formula rests on has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import FalconH1Config, FalconH1ForCausalLM, Qwen2ForCausalLM

from corelm import Backend
from corelm.errors import EngineError
from helpers import oracle
from helpers.scoring_path import scoring_path
from helpers.tiny_models import DEVICE, random_rows, tiny_model

Open = Callable[..., Backend]
VOCAB = 20_000
ROWS = random_rows(40, 60, vocab=VOCAB)


class WholeRows(TorchDispatchMode):
    """Counts the results that have the logits of a position for all ids."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # The transposed weights of the head have that shape, too.
        made = isinstance(out, Tensor) and func is not torch.ops.aten.t.default
        if made and out.is_floating_point() and out.ndim and out.shape[-1] == VOCAB and out.numel():
            self.count += 1
        return out


def whole_rows(backend: Backend, **options: Any) -> int:
    """Score, and return how many times all logits of a position were made."""
    with WholeRows() as rows:
        backend.score_logprobs(ROWS, **options)
    return rows.count


def large(family: str = "qwen2", **config: Any) -> Any:
    return tiny_model(family, vocab_size=VOCAB, num_hidden_layers=1, initializer_range=0.05, **config)


@pytest.fixture(autouse=True)
def _narrow(narrow_tiles: None) -> None:
    """Otherwise a tile of so few positions is as wide as the vocabulary."""


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "cohere"])
def test_the_second_call_makes_no_row_of_logits(open_model: Open, family: str, grad: bool) -> None:
    backend = open_model(large(family))
    assert whole_rows(backend, grad=grad) > 0
    assert whole_rows(backend, grad=grad) == 0
    assert scoring_path(backend).head == "tiled"


def test_an_adapter_on_the_body_does_not_make_it_slower(open_model: Open) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(large(), config).eval()
    backend = open_model(model)
    assert whole_rows(backend) > 0 and whole_rows(backend) == 0


def test_training_mode_does_not_make_it_slower(open_model: Open) -> None:
    model = large()
    backend = open_model(model)
    for _ in range(2):
        for training, grad in ((False, False), (True, True)):
            model.train(training)
            made = whole_rows(backend, grad=grad)
    assert made == 0


def scaled(model: Any) -> None:
    model.logit_scale = 3.0


def capped(model: Any) -> None:
    model.config.final_logit_softcapping = 0.5


def hooked(model: Any) -> None:
    model.model.register_forward_hook(lambda module, args, out: type(out)(last_hidden_state=2 * out.last_hidden_state))


def patched(model: Any) -> None:
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def replaced(model: Any) -> None:
    model.lm_head = nn.Linear(model.config.hidden_size, VOCAB, device=model.device)


@pytest.mark.parametrize(
    ("family", "change"),
    [("cohere", scaled), ("gemma2", capped), ("qwen2", hooked), ("qwen2", patched), ("qwen2", replaced)],
)
def test_what_the_formula_rests_on_is_watched(open_model: Open, family: str, change: Callable[[Any], None]) -> None:
    model = large(family)
    backend = open_model(model)
    whole_rows(backend)
    change(model)
    assert whole_rows(backend) > 0
    for ids, found in zip(ROWS, backend.score_logprobs(ROWS).logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-5)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.lm_head, "weight", 0.3)


def normed(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.lm_head)


def strided(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.randn(VOCAB, 2, device=DEVICE)[:, 0])


def expanded(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.full((1,), 0.1, device=DEVICE).expand(VOCAB))


def of_numpy(model: Any) -> None:
    model.logit_scale = np.float32(5)


def of_body(model: Any) -> None:
    model.model.lm_head_multiplier /= 2


def called_otherwise(model: Any) -> None:
    class Doubled(type(model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            output.logits = 2 * output.logits
            return output

    model.__class__ = Doubled


def falcon() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FalconH1ForCausalLM(
            FalconH1Config(vocab_size=VOCAB, num_hidden_layers=1, initializer_range=0.2, **sizes, **mamba)
        ).eval()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *[("qwen2", change) for change in (pruned, normed, strided, expanded, called_otherwise)],
        ("phi-biased", strided),
        ("cohere", of_numpy),
        ("falcon_h1", of_body),
    ],
)
def test_what_outside_eyes_found(open_model: Open, family: str, change: Callable[[Any], None]) -> None:
    model = falcon() if family == "falcon_h1" else large(family)
    if change is of_numpy:
        model.logit_scale = np.float32(3)
    backend = open_model(model)
    backend.score_logprobs(ROWS)
    change(model)
    for grad in (False, True):
        for ids, found in zip(ROWS, backend.score_logprobs(ROWS, grad=grad).logprobs.split(), strict=True):
            # A scale of 5 makes logits of 50, whose rounding is larger.
            torch.testing.assert_close(found.detach(), oracle.logprobs(model, ids), rtol=0, atol=4e-5)


def test_a_wrapper_that_looks_like_the_forward_of_the_model_is_noticed(
    open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forward, scales = large(), Qwen2ForCausalLM.forward, [1.0]

    @functools.wraps(forward)
    def scaling(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = scales[0] * output.logits
        return output

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", scaling)
    backend = open_model(model)
    for scales[0] in (1.0, 3.0):
        for ids, found in zip(ROWS, backend.score_logprobs(ROWS).logprobs.split(), strict=True):
            torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-5)


def test_logits_that_are_no_numbers_fail_with_the_row_and_the_position(open_model: Open) -> None:
    model = large()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(EngineError, match="row 0, position 1: the log-prob is nan"):
        open_model(model).score_logprobs(ROWS)


class Scaled(Qwen2ForCausalLM):
    """Scales its logits by a number in a place of its own."""

    scales = [1.0]  # noqa: RUF012

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.scales[0]
        return output


def test_code_that_is_not_of_transformers_is_tried_at_every_call(
    open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Scaled(large().config).eval()
    backend = open_model(model)
    for scale in (1.0, 1.0, 3.0):
        monkeypatch.setattr(Scaled, "scales", [scale])
        assert whole_rows(backend) > 0
        for ids, found in zip(ROWS, backend.score_logprobs(ROWS).logprobs.split(), strict=True):
            torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-5)


def test_a_forward_replaced_for_the_class_is_noticed(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries do that bring faster kernels for models of transformers."""
    model = large()
    backend, forward = open_model(model), Qwen2ForCausalLM.forward
    whole_rows(backend)

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", doubled)
    for ids, found in zip(ROWS, backend.score_logprobs(ROWS).logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-5)
