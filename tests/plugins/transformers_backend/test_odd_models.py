"""Models with an unusual forward, head, folder or limit open and give right numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from corelm.errors import CapabilityError
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
    spoil_cache_after,
    wide,
)
from helpers.tiny_models import DEVICE, random_rows, tiny_model


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.nightly)], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# What opens -----------------------------------------------------------------------------------------------------------


class Hidden(LlamaForCausalLM):
    """Hides its arguments, as a wrapper does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_forward_that_hides_its_arguments_decodes_with_a_cache(open_model: Open) -> None:
    model = wide(Hidden(LlamaConfig(**SIZES)))
    passes = ForwardPasses(model)
    backend = open_model(model)
    check(backend, model)
    assert (len(PROMPTS), 1) in passes


def test_a_head_of_several_layers(open_model: Open) -> None:
    model = tiny_model("llama")
    model.lm_head = nn.Sequential(nn.Linear(model.config.hidden_size, 16), nn.Tanh(), nn.Linear(16, 512)).to(DEVICE)
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
    assert_scores(backend, model, rows)


def test_a_model_that_also_reads_images_opens_from_a_folder(open_model: Open, tmp_path: Path) -> None:
    text = SIZES | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {"embed_dim": 32, "depth": 1, "num_heads": 2, "hidden_size": 32, "patch_size": 4}
    special = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
    model = wide(Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **special)))
    model.save_pretrained(tmp_path)
    backend = open_model(str(tmp_path))
    rows = [[each % 250 for each in row] for row in ROWS]
    assert_scores(backend, model, rows)


def test_a_folder_that_holds_only_an_adapter_opens(open_model: Open, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    tuned = with_lora(model, "q_proj")
    tuned.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    tuned.save_pretrained(tmp_path / "adapter")
    backend = open_model(str(tmp_path / "adapter"))
    assert_scores(backend, tuned)


def test_a_folder_of_something_else_is_refused(open_model: Open, tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(CapabilityError, match="no causal language model for the model type 'vit'"):
        open_model(str(tmp_path))


def test_a_limit_of_minus_one_is_no_limit(open_model: Open) -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = -1
    assert open_model(model).capabilities.max_context is None


def test_a_window_begins_at_its_own_length(open_model: Open) -> None:
    """A way that agrees below the window of the configuration is tried again beyond it."""
    model = wide(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=100)))
    spoil_cache_after(model, 100)
    backend = open_model(model)
    prompts, sampling = random_rows(96, 96), {"max_new_tokens": 3, "ignore_eos": True}
    assert_answers(backend.generate(prompts, sampling), model, prompts)
    assert_answers(backend.generate(prompts, sampling | {"max_new_tokens": 9}), model, prompts)
