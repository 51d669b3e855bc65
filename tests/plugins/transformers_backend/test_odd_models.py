"""Models with an unusual forward, head, folder or limit open and give right numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from corelm.errors import CapabilityError
from helpers import oracle
from helpers.plain_forward import ROWS, SIZES, Open, check, decoder, wide
from helpers.tiny_models import DEVICE, tiny_model
from transformers_backend.engine import CausalLM
from transformers_backend.trials import LengthClasses


@pytest.fixture(params=[True, False], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


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


def test_a_folder_that_holds_only_an_adapter_opens(open_model: Open, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    tuned = get_peft_model(model, config)
    tuned.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    tuned.save_pretrained(tmp_path / "adapter")
    backend = open_model(str(tmp_path / "adapter"))
    for row, found in zip(ROWS, backend.score_logprobs(ROWS).logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(tuned, row), rtol=0, atol=1e-5)


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
