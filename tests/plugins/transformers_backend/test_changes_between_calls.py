"""The model belongs to the caller: whatever they change between two calls takes effect in the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Phi3Config, Qwen2ForCausalLM

from corelm import Backend
from corelm.errors import InvalidRequestError
from helpers import oracle
from helpers.scoring_path import scoring_path
from helpers.tiny_models import random_rows, tiny_model

Open = Callable[..., Backend]
ROWS = random_rows(20, 7, 20)


def check(backend: Backend, model: nn.Module, rows: list[list[int]] = ROWS) -> None:
    for row, found in zip(rows, backend.score_logprobs(rows).logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, row), rtol=1e-7, atol=1e-5)


def scaled(module: nn.Module, inputs: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return output * 1.1
    output.last_hidden_state = output.last_hidden_state * 1.1
    return output


@pytest.mark.parametrize("part", ["model", "lm_head", "model.norm"])
def test_a_hook_is_called_until_it_is_removed(open_model: Open, part: str) -> None:
    model = tiny_model("qwen2")
    backend = open_model(model)
    check(backend, model)
    hook = model.get_submodule(part).register_forward_hook(scaled)
    check(backend, model)
    hook.remove()
    check(backend, model)
    assert scoring_path(backend).head == "tiled"


def test_a_global_hook_is_called_until_it_is_removed(open_model: Open) -> None:
    model = tiny_model("qwen2")
    backend = open_model(model)
    check(backend, model)
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: output * 1.1 if module is model.lm_head else None
    )
    try:
        check(backend, model)
    finally:
        hook.remove()
    check(backend, model)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("cohere", lambda model: setattr(model, "logit_scale", 3.0)),
        ("granite", lambda model: setattr(model.config, "logits_scaling", 1.0)),
        ("gemma2", lambda model: setattr(model.config, "final_logit_softcapping", 3.0)),
    ],
)
def test_a_new_scale_or_cap_takes_effect(open_model: Open, family: str, change: Callable[[nn.Module], None]) -> None:
    model = tiny_model(family)
    backend = open_model(model)
    check(backend, model)
    change(model)
    check(backend, model)


class Scaled(Qwen2ForCausalLM):
    """Scales its logits by a learned parameter."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.scale
        return output


def test_a_learned_scale_gets_gradients_and_takes_effect(open_model: Open) -> None:
    model = Scaled(tiny_model("qwen2").config).eval()
    backend = open_model(model)
    check(backend, model)
    backend.score_logprobs(ROWS, grad=True).logprobs.values.sum().backward()
    found = model.scale.grad
    assert scoring_path(backend).head == "sliced" and found is not None
    model.zero_grad()
    for row in ROWS:
        logprobs = oracle.own_logits(model, row)[:-1].log_softmax(-1)
        logprobs.gather(-1, torch.tensor(row[1:])[:, None]).sum().backward()
    torch.testing.assert_close(found, model.scale.grad, rtol=1e-4, atol=1e-4)
    model.scale.data.fill_(1.0)
    check(backend, model)
    assert scoring_path(backend).head == "tiled"


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_rows_share_a_start_only_without_dropout(open_model: Open, dropout: float) -> None:
    """Dropout is found by reading twice, so it does not matter what a family calls it."""
    config = tiny_model("opt").config
    config.dropout, config.attention_dropout = dropout, 0.0
    model = AutoModelForCausalLM.from_config(config).eval()
    # Only the layers: in some releases of transformers the decoder draws a random number for every layer it may drop.
    model.get_decoder().layers.train()
    row, backend = random_rows(40)[0], open_model(model)
    before = torch.get_rng_state()
    one, other = backend.score_logprobs([[*row, 5, 6], [*row, 7, 8]], grad=True).logprobs.split()
    assert torch.equal(one[:40], other[:40]) is (dropout == 0.0)
    assert (scoring_path(backend).shared > 0) is (dropout == 0.0)
    assert torch.equal(before, torch.get_rng_state()) is (dropout == 0.0)


# Position encoding that changes with the length of the forward pass ----------------------------------------


@pytest.fixture
def longrope() -> nn.Module:
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
    config = Phi3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        max_position_embeddings=512,
        original_max_position_embeddings=32,
        rope_parameters={**rope, "original_max_position_embeddings": 32},
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_scores_of_long_and_short_rows_do_not_mix(open_model: Open, longrope: nn.Module) -> None:
    check(open_model(longrope), longrope, random_rows(20, 60, 32, 33, 31, 34, seed=1))


def test_answers_of_long_and_short_prompts_do_not_mix(open_model: Open, longrope: nn.Module) -> None:
    prompts, backend = random_rows(5, 60, 25, 33, seed=1), open_model(longrope)
    out = backend.generate(prompts, {"max_new_tokens": 8, "seed": 3})
    for prompt, answer, found in zip(prompts, out.ids.tolist(), out.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.answer_logprobs(longrope, prompt, answer), rtol=1e-7, atol=1e-5)


def test_an_answer_that_could_cross_the_switch_is_refused(open_model: Open, longrope: nn.Module) -> None:
    with pytest.raises(InvalidRequestError, match="row 1: its prompt is within 32 tokens") as error:
        open_model(longrope).generate(random_rows(5, 26, 60), {"max_new_tokens": 8})
    assert error.value.rows == (1,) and error.value.field == "max_new_tokens"
