"""The model belongs to the caller: whatever they change between two calls takes effect in the second."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Phi3Config, Qwen2ForCausalLM

from corelm.errors import InvalidRequestError
from helpers.plain_forward import Open, assert_answers, assert_same_gradients, assert_scores, gradients, own_loss
from helpers.scoring_path import scoring_path
from helpers.tiny_models import random_rows, tiny_model

ROWS = random_rows(20, 7, 20)


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
    assert_scores(backend, model, ROWS)
    found = gradients(model, backend.score_logprobs(ROWS, grad=True).logprobs.values.sum())
    assert scoring_path(backend).head == "sliced" and "scale" in found
    assert_same_gradients(found, gradients(model, own_loss(model, ROWS)))
    model.scale.data.fill_(1.0)
    assert_scores(backend, model, ROWS)
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


def with_switch(tokens: int) -> nn.Module:
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
        original_max_position_embeddings=tokens,
        rope_parameters={**rope, "original_max_position_embeddings": tokens},
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def longrope() -> nn.Module:
    return with_switch(32)


def test_one_row_that_ends_at_the_switch(open_model: Open) -> None:
    model = with_switch(31)
    backend = open_model(model)
    # 31 tokens are read.
    assert_scores(backend, model, random_rows(32, seed=1))


def test_scores_of_long_and_short_rows_do_not_mix(open_model: Open, longrope: nn.Module) -> None:
    assert_scores(open_model(longrope), longrope, random_rows(20, 60, 32, 33, 31, 34, seed=1))


def test_answers_of_long_and_short_prompts_do_not_mix(open_model: Open, longrope: nn.Module) -> None:
    prompts, backend = random_rows(5, 60, 25, 33, seed=1), open_model(longrope)
    out = backend.generate(prompts, {"max_new_tokens": 8, "seed": 3})
    assert_answers(out, longrope, prompts)


def test_an_answer_that_could_cross_the_switch_is_refused(open_model: Open, longrope: nn.Module) -> None:
    with pytest.raises(InvalidRequestError, match="row 1: its prompt is within 32 tokens") as error:
        open_model(longrope).generate(random_rows(5, 26, 60), {"max_new_tokens": 8})
    assert error.value.rows == (1,) and error.value.field == "max_new_tokens"
