"""Models with LoRA adapters of PEFT that change them much."""

from typing import Any

import peft
import torch


def lora_config(*targets: str, rank: int = 4, **more: Any) -> peft.LoraConfig:
    targets = targets or ("q_proj", "v_proj")
    return peft.LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=list(targets), init_lora_weights=False, **more)


def with_lora(model: Any, *targets: str, seed: int = 0, name: str = "default", **options: Any) -> peft.PeftModel:
    """Wrap a model in PEFT with an adapter on these modules, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(model, lora_config(*targets, **options), adapter_name=name).eval()
