"""Special cases: settings, adapters, hooks, heads and folders that once gave wrong numbers or untyped errors."""

import tempfile
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM, LlamaForCausalLM

from . import configs
from .cases import Case, case_of_type

Maker = Callable[[], Case]

#: Multimodal types that transformers does not open as causal language models, and the class that opens them.
MULTIMODAL = {
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "internvl"], AutoModelForImageTextToText),
    **dict.fromkeys(["idefics3", "smolvlm", "mistral3", "paligemma", "glm4v"], AutoModelForImageTextToText),
    **dict.fromkeys(["llama4", "mllama", "gemma3", "gemma4", "qwen3_5"], AutoModelForImageTextToText),
    **dict.fromkeys(["voxtral", "qwen2_audio"], AutoModelForMultimodalLM),
}
ENCODERS = ("bert", "roberta", "electra", "roformer", "big_bird")
#: The ids after which an aLoRA adapter is in force.
INVOCATION = (7, 8, 9)


def with_settings(model_type: str, **changes: Any) -> Case:
    return Case(configs.build(model_type, **changes))


def multimodal(model_type: str) -> Case:
    return Case(configs.random_model(configs.config(model_type), MULTIMODAL[model_type]))


def folder(model_type: str) -> Case:
    case = multimodal(model_type)
    case.opened = tempfile.mkdtemp()
    case.model.save_pretrained(case.opened)
    return case


def not_causal() -> Case:
    model = configs.build("llama")
    model.config.is_causal = False
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    return Case(model)


def wide_convolutions(model_type: str) -> Case:
    """A model whose convolutions have biases of 1, which move its time steps away from the ends of their range."""
    model = configs.build(model_type)
    for module in model.modules():
        if isinstance(module, nn.Conv1d) and module.bias is not None:
            nn.init.ones_(module.bias)
    return Case(model)


def wide_batch() -> Case:
    """Llama 4 with prompts of which only the longest reaches the floor scale; the columns of a padded batch all do."""
    model = configs.build("llama4_text", floor_scale=256)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in (300, 20, 100)]
    return Case(model, prompts=prompts)


# Adapters -------------------------------------------------------------------------------------------------------------


def lora(**options: Any) -> Case:
    from peft import LoraConfig, get_peft_model

    model = configs.build("llama")
    adapter = LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **options
    )
    return Case(get_peft_model(model, adapter).eval())


def alora() -> Case:
    case = lora(alora_invocation_tokens=list(INVOCATION))
    case.inside = INVOCATION
    return case


# Changes after the first scoring --------------------------------------------------------------------------------------


def late_hook(hook: Callable[[Tensor], Tensor]) -> Case:
    """A hook on a layer, put there after the first scoring. It changes the layer's output, ``[rows, time, width]``."""
    case = Case(configs.build("llama"))

    def changed(module: nn.Module, args: Any, output: Any) -> Any:
        return (hook(output[0]), *output[1:]) if isinstance(output, tuple) else hook(output)

    case.change = lambda: case.model.model.layers[0].register_forward_hook(changed) and None
    return case


def add_neighbour(hidden: Tensor) -> Tensor:
    return hidden + torch.nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0))


def add_to_first_column(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:, :1] + 1.0, hidden[:, 1:]], dim=1)


def late_forward() -> Case:
    """Another `forward` of a layer's attention, put there after the first scoring."""
    case = Case(configs.build("llama"))

    def change() -> None:
        attention = case.model.model.layers[0].self_attn
        own = attention.forward

        def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return own(add_neighbour(hidden_states), *args, **kwargs)

        attention.forward = MethodType(forward, attention)

    case.change = change
    return case


# Heads and wrappers ---------------------------------------------------------------------------------------------------


class HiddenArguments(LlamaForCausalLM):
    """A model whose `forward` does not say what it takes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def hidden_arguments() -> Case:
    return Case(configs.random_model(configs.config("llama"), HiddenArguments))


def sequential_head() -> Case:
    model = configs.build("llama")
    model.lm_head = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), model.lm_head)
    return Case(model)


def quantised() -> Case:
    model = configs.build("llama")
    return Case(torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8))


SPECIAL: dict[str, Maker] = {
    "mistral/window-of-1": partial(with_settings, "mistral", sliding_window=1),
    **{f"{each}/not-a-decoder": partial(with_settings, each, is_decoder=False) for each in ENCODERS},
    "gemma3_text/bidirectional": partial(with_settings, "gemma3_text", use_bidirectional_attention=True),
    "gemma4_text/bidirectional": partial(with_settings, "gemma4_text", use_bidirectional_attention="all"),
    "llama/not-causal": not_causal,
    "inkling_text/unpadded": partial(with_settings, "inkling_text", unpadded_vocab_size=500),
    "inkling2_text/unpadded": partial(with_settings, "inkling2_text", unpadded_vocab_size=500),
    "nemotron_h/wide-convolutions": partial(wide_convolutions, "nemotron_h"),
    "zamba2/wide-convolutions": partial(wide_convolutions, "zamba2"),
    "roformer/narrow-embedding": partial(with_settings, "roformer", embedding_size=32),
    "roformer/rotated-values": partial(with_settings, "roformer", rotary_value=True),
    "llama4_text/wide-batch": wide_batch,
    "llama/lora": lora,
    "llama/alora": alora,
    "llama/late-hook-neighbours": partial(late_hook, add_neighbour),
    "llama/late-hook-first-column": partial(late_hook, add_to_first_column),
    "llama/late-attention-forward": late_forward,
    "llama/hidden-arguments": hidden_arguments,
    "llama/sequential-head": sequential_head,
    "llama/dynamic-quantisation": quantised,
    **{f"{each}/object": partial(multimodal, each) for each in MULTIMODAL},
    **{f"{each}/folder": partial(folder, each) for each in MULTIMODAL},
}


def maker(name: str) -> Maker:
    """Return the function that makes the case of that name."""
    return SPECIAL[name] if name in SPECIAL else partial(case_of_type, name)


def names() -> list[str]:
    """Return the names of all cases: every model type, then the special cases."""
    return [*configs.MODEL_TYPES, *SPECIAL]
