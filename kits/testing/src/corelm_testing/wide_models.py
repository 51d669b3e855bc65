"""`wide_model`: a tiny random model with wide weights, saved with a tokenizer in a folder that engines load.

Its distributions are far from flat, so that an error in a scale, a cap, a temperature or a cut shows in every token.
Making it takes well under a second and needs transformers, which is imported by the functions and not with this module.
"""

from __future__ import annotations

import copy
import functools
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from corelm.validate import one_of
from corelm_testing.tiny import PAD, START, build_tokenizer, read_chats, refuse_used_folder, require_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 512
CONTEXT = 512
_EOS = 2

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": _EOS,
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


def wide_model(path: str | PathLike[str], family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny random model and its tokenizer to the new folder `path`, as transformers saves them.

    The model has two layers, a width of 64, a vocabulary of 512 and a context of 512 tokens, in float32. The tokenizer
    is a byte-level BPE with a chat template: pad is id 0, BOS 1, EOS 2, and it adds none of them to a text. The same
    arguments give the same weights, and torch's generator is not changed.

    Args:
        path: the new folder.
        family: the architecture: ``llama``, ``gpt2``, ``qwen2``, ``gemma2``, ``mixtral`` or another key of `FAMILIES`.
        seed: of the weights. Another seed gives other weights for the same model: new weights to update to.
        changes: fields of the model's configuration, such as ``num_hidden_layers=1``. vLLM on a CPU needs heads of 32:
            ``hidden_size=128``.

    Raises:
        InvalidRequestError: there is no such family; or `path` is a file, or a folder that is not empty.
        BackendNotInstalledError: transformers is not installed.
    """
    folder = Path(path)
    one_of("family", family, tuple(FAMILIES))
    refuse_used_folder(folder)
    require_transformers()
    model = random_model(family, seed=seed, **changes)
    # So that EOS is likely after some prompts and unlikely after others: the kit has to see answers that end.
    model.get_output_embeddings().weight.data[_EOS] *= 2.0
    model.save_pretrained(folder)
    tokenizer = copy.deepcopy(wide_tokenizer())
    # Some engines ask for the texts of both, such as CTranslate2. Neither is added to a text.
    tokenizer.bos_token, tokenizer.unk_token = START, PAD
    tokenizer.save_pretrained(folder)
    return folder


def random_model(family: str = "qwen2", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a model as `wide_model` saves it, in eval mode; it ends fewer answers."""
    import transformers

    name, special = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(_SMALL | special | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            # Biases and gains start at 0 and 1, which would hide an engine that forgets them.
            if parameter.ndim == 1:
                parameter.data += 0.25 * torch.randn_like(parameter)
    return model.eval()


@functools.cache
def wide_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer that `wide_model` saves: at most `VOCAB` ids; pad 0, start 1, end (EOS) 2."""
    return build_tokenizer("\n".join(turn["content"] for chat in read_chats() for turn in chat), VOCAB)
