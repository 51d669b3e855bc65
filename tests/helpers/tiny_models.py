"""Tiny random models of every family whose logits are computed differently, and a tokenizer for them.

The weights have a large variance, so the distributions are far from flat and an error in a scale or a cap is visible.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from corelm.examples.tiny import build_tokenizer, read_chats

VOCAB = 512
CONTEXT = 512

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED = {"intermediate_size": 96, "num_key_value_heads": 2}

#: family → (model class, configuration). The configuration names what is special about each head.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", _GATED | {"tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", _GATED | {"tie_word_embeddings": True}),
    "llama": ("Llama", _GATED),
    "gpt2": ("GPT2", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt-projected": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": True}),
    "mixtral": (
        "Mixtral",
        _GATED
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "initializer_range": 0.15},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        _GATED | {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "granite": ("Granite", _GATED | {"logits_scaling": 0.5, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "cohere": ("Cohere", _GATED | {"logit_scale": 2.0}),
    "gemma2": ("Gemma2", _GATED | {"head_dim": 16, "final_logit_softcapping": 5.0, "sliding_window": 8}),
    "bloom": ("Bloom", {"max_position_embeddings": None}),
    "mamba": ("Mamba", {}),
    "phi-biased": ("Phi", _GATED | {"num_key_value_heads": 4}),
}


def tiny_model(family: str = "qwen2", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random model of `family`, in eval mode; the global generator is not changed."""
    name, special = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(_SMALL | special | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            # Biases and gains start at 0 and 1, which would hide a model that forgets them.
            if parameter.ndim == 1:
                parameter.data += 0.25 * torch.randn_like(parameter)
    return model.eval()


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of at most `VOCAB` ids with a ChatML template: pad 0, start 1, end (EOS) 2."""
    return build_tokenizer("\n".join(turn["content"] for chat in read_chats() for turn in chat), VOCAB)


@functools.cache
def tokenizer_that_names_only_eos() -> PreTrainedTokenizerFast:
    """Return `tiny_tokenizer` without the names of its other special tokens, as some base models come."""
    backend = copy.deepcopy(tiny_tokenizer().backend_tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tiny_tokenizer().eos_token)


def random_rows(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Return rows of these lengths of random ids, which may be special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
