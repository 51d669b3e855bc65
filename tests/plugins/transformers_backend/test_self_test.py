"""Every way to run a model is tried against its own plain forward, and what differs is not used.

The oracle is `helpers.oracle`: the plain forward of one row in float32. `tests/families` sweeps all model types.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    RobertaConfig,
    RobertaForCausalLM,
)

from corelm import Backend
from corelm.errors import CapabilityError
from helpers import oracle
from helpers.tiny_models import random_rows, tiny_model
from transformers_backend.decoding import Decoder
from transformers_backend.engine import CausalLM
from transformers_backend.self_test import SelfTest
from transformers_backend.trials import LengthClasses

Open = Callable[..., Backend]
ROWS = random_rows(30, 7, 19, 2, 30)
PROMPTS = random_rows(20, 3, 9, 20)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(params=[True, False], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def wide(model: PreTrainedModel) -> Any:
    """Give the model weights that make a mistake visible."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model.eval()


def check(backend: Backend, model: nn.Module) -> None:
    """Compare scores and generated log-probs with the oracle."""
    for row, found in zip(ROWS, backend.score_logprobs(ROWS).logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, row), rtol=0, atol=2e-5)
    made = backend.generate(PROMPTS, {"max_new_tokens": 12}, seeds=list(range(len(PROMPTS))))
    assert made.logprobs is not None
    for prompt, answer, found in zip(PROMPTS, made.ids.tolist(), made.logprobs.split(), strict=True):
        expected = oracle.logprobs(model, [*prompt, *answer])[len(prompt) :]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def decoder(backend: Backend) -> Decoder:
    found: Decoder = backend.engine.plugin.decoder
    return found


# What differs is not used ---------------------------------------------------------------------------------------------


def test_columns_that_a_model_takes_for_positions(open_model: Open) -> None:
    """Llama 4 takes the temperature of a position from its column, so left padding changes it."""
    config = Llama4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        intermediate_size_mlp=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        head_dim=8,
        floor_scale=24,
    )
    model = wide(Llama4ForCausalLM(config))
    backend = open_model(model)
    check(backend, model)
    assert decoder(backend).way == "cached"


def test_positions_that_a_model_counts_in_its_own_way(open_model: Open) -> None:
    sizes = SIZES | {"is_decoder": True, "max_position_embeddings": 130, "pad_token_id": 1}
    sizes.pop("num_key_value_heads")
    model = wide(RobertaForCausalLM(RobertaConfig(**sizes)))
    check(open_model(model), model)


def test_a_window_of_one_token(open_model: Open) -> None:
    model = wide(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=1)))
    backend = open_model(model)
    check(backend, model)
    assert decoder(backend).way is not None and decoder(backend).way.startswith("uncached")


def test_a_cached_step_that_differs_from_a_full_forward(open_model: Open) -> None:
    model = tiny_model("qwen2")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        past = kwargs.get("past_key_values")
        if past is not None and kwargs["input_ids"].shape[1] == 1:
            out.last_hidden_state = out.last_hidden_state * 1.001
        return out

    model.model.forward = forward
    backend = open_model(model)
    check(backend, model)
    assert decoder(backend).way == "uncached"


def test_beams_use_no_cache_if_cached_steps_differ(open_model: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Both models have the same full forward, so they have the same best beam."""
    model, sound = tiny_model("qwen2"), tiny_model("qwen2")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if kwargs.get("past_key_values") is not None and out.last_hidden_state.shape[1] == 1:
            out.last_hidden_state = -out.last_hidden_state
        return out

    model.model.forward = forward
    search = {"max_new_tokens": 6, "num_beams": 3, "temperature": 0.0}
    expected = open_model(sound).generate(PROMPTS, search, logprobs="none").ids.tolist()
    assert open_model(model).generate(PROMPTS, search, logprobs="none").ids.tolist() == expected
    # A way that fails on the trial rows is slower from then on, so it is told as well.
    assert "cached rows of 14 tokens get other numbers" in caplog.text


def test_a_difference_that_begins_at_a_length_is_found_on_the_callers_own_rows(
    open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Short rows use the fast way before and after."""
    model = tiny_model("qwen2")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        past = kwargs.get("past_key_values")
        if past is not None and past.get_seq_length() > 24:
            out.last_hidden_state = out.last_hidden_state * 1.01
        return out

    model.model.forward = forward
    backend = open_model(model)
    short = [prompt[:3] for prompt in PROMPTS]
    backend.generate(short, {"max_new_tokens": 4})
    assert decoder(backend).way == "cached"
    check(backend, model)
    backend.generate(PROMPTS[:1], {"max_new_tokens": 12})
    assert decoder(backend).way == "uncached"
    assert "get other numbers than the model's own forward of one row" in caplog.text
    backend.generate(short, {"max_new_tokens": 4})
    assert decoder(backend).way == "cached"


# What the verdict rests on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["model.layers.0", "model.layers.1.self_attn"])
def test_a_hook_put_on_a_layer_after_the_first_score(open_model: Open, part: str) -> None:
    """It mixes neighbours, so rows that share a forward pass change each other."""
    model = tiny_model("llama")
    backend = open_model(model)
    check(backend, model)

    def mix(module: nn.Module, inputs: Any, output: Any) -> Any:
        states = output if isinstance(output, Tensor) else output[0]
        mixed = states + 0.5 * states.roll(1, 1) * (torch.arange(states.shape[1]) > 0)[:, None]
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


def test_a_model_that_is_not_causal_is_refused_with_the_difference(open_model: Open) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    backend = open_model(wide(BertLMHeadModel(BertConfig(**sizes))))
    for call in (lambda: backend.score_logprobs(ROWS), lambda: backend.generate(PROMPTS, {"max_new_tokens": 2})):
        with pytest.raises(CapabilityError, match=r"BertLMHeadModel is not causal: .* change by [0-9.]+ on average"):
            call()


def test_a_forward_that_fails_is_refused_with_its_own_words(open_model: Open) -> None:
    class Picky(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("pixel_values are missing")

    backend = open_model(Picky(LlamaConfig(**SIZES)))
    with pytest.raises(
        CapabilityError, match="one row of 14 ids and nothing else: ValueError: pixel_values are missing"
    ):
        backend.score_logprobs(ROWS)


# What opens -----------------------------------------------------------------------------------------------------------


class Hidden(LlamaForCausalLM):
    """Hides its arguments, as a wrapper does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_forward_that_hides_its_arguments_decodes_with_a_cache(open_model: Open) -> None:
    model = wide(Hidden(LlamaConfig(**SIZES)))
    backend = open_model(model)
    check(backend, model)
    assert decoder(backend).way == "cached and padded"


def test_a_head_of_several_layers(open_model: Open) -> None:
    model = tiny_model("llama")
    model.lm_head = nn.Sequential(nn.Linear(model.config.hidden_size, 16), nn.Tanh(), nn.Linear(16, 512))
    backend = open_model(model)
    check(backend, model)


def test_logits_narrower_than_the_head(open_model: Open) -> None:
    class Cut(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits[..., :250]
            return out

    model = wide(Cut(LlamaConfig(**SIZES)))
    backend = open_model(model)
    assert backend.capabilities.vocab_size == 250
    rows = [[each % 250 for each in row] for row in ROWS]
    for row, found in zip(rows, backend.score_logprobs(rows).logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, row), rtol=0, atol=1e-5)


def test_a_model_that_also_reads_images_opens_from_a_folder(open_model: Open, tmp_path: Path) -> None:
    text = SIZES | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {"embed_dim": 32, "depth": 1, "num_heads": 2, "hidden_size": 32, "patch_size": 4}
    special = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
    model = wide(Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **special)))
    model.save_pretrained(tmp_path)
    backend = open_model(str(tmp_path))
    rows = [[each % 250 for each in row] for row in ROWS]
    for row, found in zip(rows, backend.score_logprobs(rows).logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, row), rtol=0, atol=1e-5)


def test_a_folder_of_something_else_is_refused(open_model: Open, tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(CapabilityError, match="no causal language model for the model type 'vit'"):
        open_model(str(tmp_path))


# Lengths --------------------------------------------------------------------------------------------------------------


def test_lengths_end_at_the_numbers_of_the_configuration() -> None:
    config = MistralConfig(**SIZES, sliding_window=100)
    lengths = LengthClasses(config)
    assert [lengths.end_of(length) for length in (97, 99, 100, 101)] == [99, 99, 100, 127]
    assert [lengths.start_of(length) for length in (97, 100, 101, 127)] == [65, 100, 101, 101]


def test_a_limit_of_minus_one_is_no_limit() -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = -1
    assert CausalLM(model, model).max_context is None
