"""A PEFT-wrapped model samples and scores with its adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import peft
import pytest
import torch

from corelm import Backend
from corelm.errors import CapabilityError
from helpers import oracle
from helpers.tiny_models import random_rows, tiny_model

Open = Callable[..., Backend]
ROWS = random_rows(1, 40, 9)


@pytest.fixture
def wrapped() -> peft.PeftModel:
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return peft.get_peft_model(tiny_model(), config).train()


def test_adapters_take_effect_until_they_are_disabled(open_model: Open, wrapped: peft.PeftModel) -> None:
    backend = open_model(wrapped)
    out = backend.generate(ROWS, {"max_new_tokens": 8, "seed": 0})
    scored = backend.score_logprobs(ROWS)
    for prompt, answer, found in zip(ROWS, out.ids.tolist(), out.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.answer_logprobs(wrapped, prompt, answer), rtol=0, atol=1e-5)
    for ids, found in zip(ROWS, scored.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(wrapped, ids), rtol=0, atol=1e-5)
    with wrapped.disable_adapter():
        without = oracle.logprobs(wrapped, ROWS[1])
        torch.testing.assert_close(backend.score_logprobs(ROWS).logprobs.split()[1], without, rtol=0, atol=1e-5)
    assert float((without - scored.logprobs.split()[1]).abs().max()) > 0.1
    assert wrapped.training


def test_gradients_reach_the_adapters_and_only_them(open_model: Open, wrapped: peft.PeftModel) -> None:
    open_model(wrapped).score_logprobs(ROWS, grad=True).logprobs.values.sum().backward()
    for name, parameter in wrapped.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name
        assert parameter.requires_grad == ("lora_" in name), name


def test_beams_use_the_adapters_and_ignore_generation_configs(open_model: Open, wrapped: peft.PeftModel) -> None:
    sampling = {"num_beams": 4, "max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    ids = torch.tensor([ROWS[2]])
    reference = wrapped.eval().generate(
        input_ids=ids, num_beams=4, max_new_tokens=5, do_sample=False, eos_token_id=None
    )
    wrapped.generation_config = copy.deepcopy(wrapped.generation_config)
    wrapped.generation_config.repetition_penalty = 9.0
    (answer,) = open_model(wrapped).generate(ids, sampling, logprobs="none").ids.tolist()
    assert answer == reference[0, ids.shape[1] :].tolist()


def test_virtual_tokens_are_refused(open_model: Open) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(CapabilityError, match="LoRA"):
        open_model(peft.get_peft_model(tiny_model(), config))
