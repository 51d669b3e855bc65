"""What the verdict of the self-test rests on, when the model is tried again, and which models are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM

from corelm.errors import CapabilityError
from helpers import oracle
from helpers.plain_forward import PROMPTS, ROWS, SIZES, Open, check, wide
from helpers.tiny_models import tiny_model
from transformers_backend.self_test import SelfTest


@pytest.fixture(params=[True, False], ids=["fast", "plain"])
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


def test_adapters_that_are_switched_on_and_off_are_tried_once_each(
    open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    backend = open_model(model)
    tries: list[SelfTest] = []
    plain = SelfTest._try_plain_forward

    def counted(self_test: SelfTest, *args: Any) -> None:
        tries.append(self_test)
        plain(self_test, *args)

    monkeypatch.setattr(SelfTest, "_try_plain_forward", counted)
    for _ in range(3):
        backend.score_logprobs(ROWS)
        with model.disable_adapter():
            backend.score_logprobs(ROWS)
    assert len(tries) == 2


def test_an_adapter_that_looks_at_the_ids_of_a_call(open_model: Open) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        alora_invocation_tokens=[5, 6],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(tiny_model("llama"), config)
    rows = [[1, 2, 5, 6, 9, 9, 8], [3, 5, 6, 7], [1, 2, 3, 4, 5, 4]]
    backend = open_model(model)
    for row, found in zip(rows, backend.score_logprobs(rows).logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, row), rtol=0, atol=1e-5)
    made = backend.generate(rows, {"max_new_tokens": 5})
    assert made.logprobs is not None
    for prompt, answer, found in zip(rows, made.ids.tolist(), made.logprobs.split(), strict=True):
        expected = oracle.logprobs(model, [*prompt, *answer])[len(prompt) :]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with pytest.raises(CapabilityError, match="aLoRA"):
        backend.generate(rows, {"max_new_tokens": 5, "num_beams": 2, "temperature": 0.0}, logprobs="none")


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_not_causal_is_refused_with_the_difference(open_model: Open, dtype: torch.dtype) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    backend = open_model(wide(BertLMHeadModel(BertConfig(**sizes))).to(dtype))
    for call in (lambda: backend.score_logprobs(ROWS), lambda: backend.generate(PROMPTS, {"max_new_tokens": 2})):
        with pytest.raises(CapabilityError, match=r"BertLMHeadModel is not causal: .* change by [0-9.]+ on average"):
            call()


def test_a_forward_that_failed_once_is_tried_again(open_model: Open) -> None:
    model = tiny_model("llama")
    backend = open_model(model)

    def broken(module: nn.Module, inputs: Any, output: Any) -> None:
        raise ValueError("not today")

    with model.model.register_forward_hook(broken), pytest.raises(CapabilityError, match="not today"):
        backend.score_logprobs(ROWS)
    check(backend, model)


def test_a_refusal_holds_no_tensors_of_an_earlier_call(open_model: Open) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    backend = open_model(wide(BertLMHeadModel(BertConfig(**sizes))))
    errors = []
    for _ in range(2):
        with pytest.raises(CapabilityError) as caught:
            backend.score_logprobs(ROWS)
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_a_row_that_overflows_leaves_the_fast_ways_alone(open_model: Open) -> None:
    """Its log-probs are NaN in every way."""
    model = tiny_model("qwen2")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state.masked_fill((kwargs["input_ids"] == 7)[..., None], torch.nan)
        return out

    model.model.forward = forward
    backend = open_model(model)
    backend.generate(PROMPTS, {"max_new_tokens": 4, "seed": 0})
    sick = [[9] * 30, [7, 8] * 12]
    self_test = backend.engine.plugin.self_test
    plain_rows = [torch.tensor(row) for row in sick]
    numbers = [oracle.logprobs(model, row)[1:].float() for row in sick]
    assert not numbers[1].isfinite().all() and self_test.agrees_on(plain_rows, numbers)
    numbers[1] = numbers[1].nan_to_num(0.0)
    assert not self_test.agrees_on(plain_rows, numbers)


def test_a_forward_that_fails_is_refused_with_its_own_words(open_model: Open) -> None:
    class Picky(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("pixel_values are missing")

    backend = open_model(Picky(LlamaConfig(**SIZES)))
    with pytest.raises(
        CapabilityError, match="one row of 14 ids and nothing else: ValueError: pixel_values are missing"
    ):
        backend.score_logprobs(ROWS)
