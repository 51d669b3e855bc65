"""LoRA adapters made by hand, without PEFT, and the plain model that an adapter makes of another one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def lora(model: Any, seed: int = 0, rank: int = 8, targets: Sequence[str] = ("q_proj", "v_proj", "down_proj")) -> Any:
    """Return the state dict and the configuration of an adapter that changes the model much."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            out, inner = module.weight.shape
            state[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inner, generator=generator) / 5
            state[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) / 5
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [*targets],
    }
    return state, config


def merged(model: Any, state: dict[str, Tensor]) -> Any:
    """Add an adapter to the weights of a plain model, and return the model."""
    with torch.no_grad():
        for name, up in state.items():
            if name.endswith(".lora_B.weight"):
                down = state[name.replace("lora_B", "lora_A")]
                model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")).weight += (
                    up @ down
                ).to(model.device)
    return model


def save(state: dict[str, Tensor], config: dict[str, Any], folder: Path) -> Path:
    """Write an adapter as PEFT would."""
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
