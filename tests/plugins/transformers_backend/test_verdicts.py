"""What the verdict of the self-test rests on, when the model is tried again, and which models are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM

from corelm.errors import CapabilityError, EngineError
from helpers.peft_models import with_lora
from helpers.plain_forward import (
    PROMPTS,
    ROWS,
    SIZES,
    ForwardPasses,
    Open,
    assert_answers,
    assert_scores,
    check,
    wide,
)
from helpers.scoring_path import scoring_path
from helpers.tiny_models import random_rows, tiny_model


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.nightly)], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# What the verdict rests on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["model.layers.0", "model.layers.1.self_attn"])
def test_a_hook_put_on_a_layer_after_the_first_score(open_model: Open, part: str) -> None:
    """It mixes neighbours, so rows that share a forward pass change each other."""
    model = tiny_model("llama")
    backend = open_model(model)
    check(backend, model)

    def mix(module: nn.Module, inputs: Any, output: Any) -> Any:
        states = output if isinstance(output, Tensor) else output[0]
        mixed = states + 0.5 * states.roll(1, 1) * (torch.arange(states.shape[1], device=states.device) > 0)[:, None]
        return mixed if isinstance(output, Tensor) else (mixed, *output[1:])

    hook = model.get_submodule(part).register_forward_hook(mix)
    check(backend, model)
    hook.remove()
    check(backend, model)


def test_a_forward_replaced_after_the_first_score(open_model: Open) -> None:
    model = tiny_model("llama")
    backend = open_model(model)
    check(backend, model)
    attention = model.model.layers[0].self_attn
    plain = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        states, *rest = plain(*args, **kwargs)
        return (states + states[:, :1], *rest)

    attention.forward = forward
    check(backend, model)


def test_weights_that_show_a_difference_only_when_they_are_trained(open_model: Open) -> None:
    """A new adapter multiplies by zero: what it does wrong shows after the first step of the optimizer."""

    class Late(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            kept = kwargs.get("attention_mask")
            out.logits = out.logits * (1 + self.gate * (kept is not None))
            return out

    model = wide(Late(LlamaConfig(**SIZES)))
    backend = open_model(model)
    check(backend, model)
    with torch.no_grad():
        model.gate += 1.0
    check(backend, model)


def test_adapters_that_are_switched_on_and_off_are_tried_once_each(open_model: Open) -> None:
    model = with_lora(tiny_model("llama"), "q_proj")
    passes = ForwardPasses(model)
    backend, counts = open_model(model), []
    for _ in range(3):
        passes.clear()
        backend.score_logprobs(ROWS)
        with model.disable_adapter():
            backend.score_logprobs(ROWS)
        counts.append(len(passes))
    # Each of the two is tried in the first round only.
    assert counts[0] > counts[1] == counts[2]


def test_an_adapter_that_looks_at_the_ids_of_a_call(open_model: Open) -> None:
    model = with_lora(tiny_model("llama"), "q_proj", "v_proj", alora_invocation_tokens=[5, 6])
    rows = [[1, 2, 5, 6, 9, 9, 8], [3, 5, 6, 7], [1, 2, 3, 4, 5, 4]]
    backend = open_model(model)
    assert_scores(backend, model, rows)
    twice = with_lora(tiny_model("llama"), "q_proj", "v_proj", alora_invocation_tokens=[5, 5])
    # Seven tokens are read: if the last one came once more, the adapter would apply from there on.
    assert_scores(open_model(twice), twice, [[1, 2, 5, 5, 9, 8, 5, 3]])
    assert_answers(backend.generate(rows, {"max_new_tokens": 5}), model, rows)
    with pytest.raises(CapabilityError, match="aLoRA"):
        backend.generate(rows, {"max_new_tokens": 5, "num_beams": 2, "temperature": 0.0}, logprobs="none")


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_causal_is_refused_with_the_difference(open_model: Open) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    for dtype in (torch.float32, torch.bfloat16):
        backend = open_model(wide(BertLMHeadModel(BertConfig(**sizes))).to(dtype))
        calls = (lambda b=backend: b.score_logprobs(ROWS), lambda b=backend: b.generate(PROMPTS, {"max_new_tokens": 2}))
        errors = []
        for call in (*calls, calls[0], lambda b=backend: b.score_logprobs(PROMPTS[:1])):
            with pytest.raises(CapabilityError, match=r"BertLMHeadModel is not causal: .* change by [0-9.]+") as caught:
                call()
            errors.append(caught.value)
        # An error holds the tensors of its call, so each call has its own.
        assert errors[0] is not errors[2]


def test_a_forward_that_failed_once_is_tried_again(open_model: Open) -> None:
    model = tiny_model("llama")
    backend = open_model(model)

    def broken(module: nn.Module, inputs: Any, output: Any) -> None:
        raise ValueError("not today")

    with model.model.register_forward_hook(broken), pytest.raises(CapabilityError, match="not today"):
        backend.score_logprobs(ROWS)
    check(backend, model)


def test_a_row_that_overflows_leaves_the_fast_ways_alone(open_model: Open, fast: bool) -> None:
    """Its log-probs are NaN in every way."""
    model = tiny_model("qwen2")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state.masked_fill((kwargs["input_ids"] == 7)[..., None], torch.nan)
        return out

    model.model.forward = forward
    backend = open_model(model)
    sick = [[9] * 30, [7, 8] * 12]
    backend.generate(PROMPTS, {"max_new_tokens": 4, "seed": 0})
    with pytest.raises(EngineError):
        backend.score_logprobs(sick)
    assert_scores(backend, model, [row for row in ROWS if 7 not in row])
    assert scoring_path(backend).layout != "padded" or not fast


def test_a_model_whose_numbers_depend_on_the_length_of_the_row_is_refused(open_model: Open) -> None:
    """As ProphetNet's do. Later ids of the same number change nothing."""
    model = tiny_model("llama")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * (1 + 0.1 * out.last_hidden_state.shape[1])
        return out

    model.model.forward = forward
    for fast in (True, False):
        for rows in (random_rows(30, 7, 19, 2), random_rows(19)):
            with pytest.raises(CapabilityError, match="not causal"):
                open_model(model, fast=fast).score_logprobs(rows)


@pytest.mark.parametrize("together", [False, True])
def test_a_row_by_itself_says_nothing_of_rows_that_are_read_together(open_model: Open, together: bool) -> None:
    """The model is wrong for several rows of more than 24 tokens."""
    model = tiny_model("llama")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if len(out.last_hidden_state) > 1 and out.last_hidden_state.shape[1] > 24:
            out.last_hidden_state = -out.last_hidden_state
        return out

    model.model.forward = forward
    backend = open_model(model, fast=False, max_batch_tokens=100)
    for rows in [random_rows(100, 40, 40)] if together else [random_rows(100), random_rows(40, 40)]:
        assert_scores(backend, model, rows)


def test_a_forward_that_fails_is_refused_with_its_own_words(open_model: Open) -> None:
    class Picky(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("pixel_values are missing")

    backend = open_model(Picky(LlamaConfig(**SIZES)))
    with pytest.raises(
        CapabilityError, match="one row of 8 ids and nothing else: ValueError: pixel_values are missing"
    ):
        backend.score_logprobs(ROWS)
