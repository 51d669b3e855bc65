"""Planted defects: engines that are wrong in one thing each. `corelm compare` must name it, and accuse no sound one."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import corelm
from corelm import Backend
from helpers import planted_engines as engines
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer
from transformers_backend import TransformersBackend

LONG_PROMPTS = random_rows(30, 60, seed=5)
PROMPTS: list[Any] = [
    "Who are you?",
    [{"role": "user", "content": "What is your name?"}],
    *random_rows(12, seed=4),
    *LONG_PROMPTS,
]


def saved(folder: Path, family: str, seed: int, **changes: Any) -> Path:
    """Save a tiny model and its tokenizer in a folder."""
    tiny_model(family, seed=seed, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def loaded(folder: Path, **config: Any) -> PreTrainedModel:
    """Load the model of a folder in float32, with other values in its configuration."""
    settings = AutoConfig.from_pretrained(folder)
    for name, value in config.items():
        setattr(settings, name, value)
    return AutoModelForCausalLM.from_pretrained(folder, config=settings, dtype=torch.float32).eval()


def opened(plugin: type[TransformersBackend], model: PreTrainedModel, tokenizer: Any, name: str = "planted") -> Backend:
    """Return a backend for a plugin on a model object."""
    return Backend.from_plugin(plugin.open(model, tokenizer=tokenizer), name, model_name="planted")


# The table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defect:
    """A planted defect.

    Attributes:
        cause: what must be named.
        open: returns the spoilt backend for the folder of a sound model.
        family, changes: the model it is planted into, and changes of its configuration.
    """

    cause: str
    open: Callable[[Path], Backend]
    family: str
    changes: dict[str, Any] = field(default_factory=dict)


def _plugin(plugin: type[TransformersBackend]) -> Callable[[Path], Backend]:
    return lambda folder: opened(plugin, loaded(folder), AutoTokenizer.from_pretrained(folder))


def _config(**changes: Any) -> Callable[[Path], Backend]:
    """The sound plugin on the same weights with another configuration."""
    return lambda folder: opened(TransformersBackend, loaded(folder, **changes), AutoTokenizer.from_pretrained(folder))


def _weights(change: Callable[[str, Tensor], Tensor]) -> Callable[[Path], Backend]:
    """The sound plugin on changed weights."""

    def make(folder: Path) -> Backend:
        model = loaded(folder)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(change(name, parameter))
        return opened(TransformersBackend, model, AutoTokenizer.from_pretrained(folder))

    return make


def older(name: str, weight: Tensor) -> Tensor:
    """Return the weight before an update that moved it by 3 %."""
    generator = torch.Generator().manual_seed(len(name))
    return weight + 0.03 * weight.std(correction=0).clamp_min(1e-3) * torch.randn(weight.shape, generator=generator)


def eight_bits(name: str, weight: Tensor) -> Tensor:
    """Round a matrix to 8 bits, one scale for each row, as bitsandbytes does."""
    if weight.ndim != 2 or "embed" in name or "head" in name:
        return weight
    scale = weight.abs().amax(-1, keepdim=True) / 127
    return (weight / scale).round() * scale


def eight_bits_in_groups(name: str, weight: Tensor) -> Tensor:
    """Round every matrix to 8 bits, one scale for 32 values, as llama.cpp's Q8_0 does."""
    if weight.ndim != 2:
        return weight
    parts = weight.reshape(-1, 32)
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return ((parts / scale).round() * scale).reshape(weight.shape)


def four_bits(name: str, weight: Tensor) -> Tensor:
    """Round a matrix to 4 bits with a zero point for groups of 32, as GPTQ and AWQ store it."""
    if weight.ndim != 2 or "embed" in name or "head" in name:
        return weight
    parts = weight.reshape(-1, 32)
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    scale = (high - low) / 15
    return (((parts - low) / scale).round() * scale + low).reshape(weight.shape)


def _template(change: Callable[[str], str]) -> Callable[[Path], Backend]:
    def make(folder: Path) -> Backend:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = change(tokenizer.chat_template)
        return opened(TransformersBackend, loaded(folder), tokenizer)

    return make


def _eos(*ids: int) -> Callable[[Path], Backend]:
    def make(folder: Path) -> Backend:
        model = loaded(folder)
        model.generation_config.eos_token_id = list(ids)
        return opened(TransformersBackend, model, AutoTokenizer.from_pretrained(folder))

    return make


def _stale_cache(folder: Path) -> Backend:
    """An engine that has served the prompts with earlier weights, and got the new ones then."""
    model = loaded(folder)
    new = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(older(name, parameter))
    backend = opened(engines.StaleCache, model, AutoTokenizer.from_pretrained(folder))
    backend.score_logprobs(LONG_PROMPTS)
    backend.update_weights(new)
    return backend


def _half(dtype: torch.dtype) -> Callable[[Path], Backend]:
    return lambda folder: opened(TransformersBackend, loaded(folder).to(dtype), AutoTokenizer.from_pretrained(folder))


def _no_biases(name: str, weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if name.endswith("bias") else weight


def _linear_rope(folder: Path) -> Backend:
    rope = {**AutoConfig.from_pretrained(folder).rope_parameters, "rope_type": "linear", "factor": 4.0}
    return _config(rope_parameters=rope)(folder)


def _no_rope_scaling(folder: Path) -> Backend:
    rope = {**AutoConfig.from_pretrained(folder).rope_parameters, "rope_type": "default"}
    return _config(rope_parameters=rope)(folder)


_SCALED_ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}}

DEFECTS: dict[str, Defect] = {
    "shift forward": Defect("shift", _plugin(engines.ShiftedForward), "qwen2"),
    "shift back": Defect("shift", _plugin(engines.ShiftedBack), "llama"),
    "adds BOS to ids": Defect("bos-added", _plugin(engines.AddsBos), "qwen2"),
    "drops the first id": Defect("first-token-dropped", _plugin(engines.DropsFirst), "llama"),
    "cuts long rows on the left": Defect("truncation", _plugin(engines.CutsLeft), "qwen2"),
    "chunks that do not see one another": Defect("chunked-prefill", _plugin(engines.ForgetsChunks), "qwen2"),
    "logarithms to base 2": Defect("units", _plugin(engines.Bits), "qwen2"),
    "counts padded ids": Defect("vocab-padding", _plugin(engines.CountsPadding), "qwen2"),
    "normalises over the top 200": Defect("top-only", _plugin(engines.TopOnly), "llama"),
    "forbids EOS in scores": Defect("eos-suppressed", _plugin(engines.ForbidsEos), "qwen2"),
    "scores at temperature 1.3": Defect("missing-scale", _plugin(engines.Heats), "qwen2"),
    "pads without a mask": Defect("company", _plugin(engines.PadsWithoutMask), "qwen2"),
    "rows attend to one another": Defect("company", _plugin(engines.LeaksBetweenRows), "llama"),
    "a wrong entry in the prefix cache": Defect("prefix-cache", _plugin(engines.ForgetsItsCache), "qwen2"),
    "prefixes of earlier weights": Defect("prefix-cache", _stale_cache, "qwen2"),
    "dropout left on": Defect("not-deterministic", _plugin(engines.Drops), "qwen2"),
    "temperature inside log-probs": Defect("temperature", _plugin(engines.SaysScaled), "qwen2"),
    "truncation inside log-probs": Defect("truncation-in-logprobs", _plugin(engines.SaysTruncated), "llama"),
    "penalties inside log-probs": Defect("penalties", _plugin(engines.SaysPenalized), "qwen2"),
    "sampled numbers one late": Defect("shift", _plugin(engines.SamplesOneLate), "qwen2"),
    "no softcap": Defect("missing-softcap", _config(final_logit_softcapping=None), "gemma2"),
    "no logits_scaling": Defect("missing-scale", _config(logits_scaling=1.0), "granite"),
    "no logit_scale": Defect("missing-scale", _config(logit_scale=1.0), "cohere"),
    "no embedding_multiplier": Defect("missing-scale", _config(embedding_multiplier=1.0), "granite"),
    "no biases": Defect("missing-bias", _weights(_no_biases), "qwen2"),
    "no sliding window": Defect("sliding-window", _config(sliding_window=1 << 20), "gemma2"),
    "rope scaling that is not there": Defect("rope", _linear_rope, "llama"),
    "rope scaling left out": Defect("rope", _no_rope_scaling, "llama", _SCALED_ROPE),
    "weights before an update": Defect("other-weights", _weights(older), "qwen2"),
    "8 bits": Defect("quantized", _weights(eight_bits), "qwen2"),
    "8 bits, embeddings and head too": Defect("quantized", _weights(eight_bits_in_groups), "qwen2"),
    "4 bits with zero points": Defect("quantized", _weights(four_bits), "llama"),
    "bfloat16": Defect("dtype", _half(torch.bfloat16), "qwen2"),
    "float16": Defect("dtype", _half(torch.float16), "llama"),
    "BOS before every text": Defect("bos-added", _plugin(engines.DoublesBos), "qwen2"),
    "special tokens as text": Defect("special-tokens-as-text", _plugin(engines.ReadsSpecialsAsText), "llama"),
    "another tokenizer": Defect("tokenization", _plugin(engines.ReadsCharacters), "qwen2"),
    "another chat template": Defect(
        "chat-template",
        _template(lambda text: text.replace("message['role'] +", "message['role']|upper +")),
        "qwen2",
    ),
    "no generation prompt": Defect(
        "generation-prompt",
        _template(lambda text: text[: text.index("{% if add_generation_prompt %}")]),
        "llama",
    ),
    "knows another EOS": Defect("ends", _eos(2, 9), "qwen2"),
    "goes on after a stop string": Defect("stop-string", _plugin(engines.StopsLate), "qwen2"),
}


def sound(folder: Path, **options: Any) -> Backend:
    """Open a sound engine on a folder."""
    return corelm.get_backend("transformers", folder, **{"dtype": "float32", **options})
