"""Which weights vLLM in this process can load after it was opened, and what they are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from corelm.errors import CapabilityError
from corelm_engine_kit import configured_shapes, local_checkpoint

if TYPE_CHECKING:
    from corelm_engine_kit import Expected

#: The load format with which vLLM fills a model with random numbers, for weights that come later.
DUMMY = "dummy"

#: The load formats after which vLLM can load other weights from a folder.
RELOADABLE_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", DUMMY})

#: The fields of a model's configuration that give its number of experts, as vLLM looks for them.
_NUMBERS_OF_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def checkpoint_of(config: Any) -> Expected | None:
    """Return what new weights are compared with; None if vLLM has loaded something else or cannot load again.

    Raises:
        CapabilityError: vLLM was opened without weights, and cannot be given any.
    """
    model, dummy = config.model_config, config.load_config.load_format == DUMMY
    if why := why_not_again(config):
        if dummy:
            raise CapabilityError(f"load_format={DUMMY!r} needs weights later, but {why}", capability="load_format")
        return None
    folder = files_of(config)
    if dummy and folder is None:
        option, capability = f"load_format={DUMMY!r}", "load_format"
        return configured_shapes(model.hf_config, model.trust_remote_code, option=option, capability=capability)
    return folder


def files_of(config: Any) -> Path | None:
    """Return the folder of the model's safetensors, even if vLLM could not load others; None if there is none."""
    model = config.model_config
    return local_checkpoint(model.model, revision=model.revision, cache_dir=config.load_config.download_dir)


def runs_here(config: Any) -> bool:
    """Return whether the worker of a synchronous engine is in this process."""
    from vllm import envs

    return not envs.VLLM_ENABLE_V1_MULTIPROCESSING and config.parallel_config.distributed_executor_backend == "uni"


def why_not_again(config: Any) -> str:
    """Return why vLLM would not use every tensor of weights that it is told to load later; "" if it would."""
    from vllm.platforms import current_platform

    load_format = config.load_config.load_format
    if load_format not in RELOADABLE_FORMATS:
        return f"vLLM was opened with load_format={load_format!r}; open a folder of safetensors"
    model = config.model_config
    return obstacle(model.hf_text_config, "cpu" if current_platform.is_cpu() else None, model.is_moe)


def obstacle(text: Any, device: str | None, has_experts: bool = False) -> str:
    """Return why vLLM would answer wrongly after it has loaded weights again, and what to do; "" if it would not.

    On a CPU, as seen with vLLM 0.32.

    Args:
        text: the configuration of the language model; None if it is not known.
        device: what vLLM runs on; None if it is not known.
        has_experts: whether vLLM finds experts in the model.
    """
    if text is None or device != "cpu":
        return ""
    if has_experts or any(getattr(text, name, 0) for name in _NUMBERS_OF_EXPERTS):
        return "on a CPU, vLLM answers wrongly after it has loaded a mixture of experts again; use another engine"
    if getattr(text, "tie_word_embeddings", False):
        # vLLM packs the weights of the head when it first loads them. If it is tied to the embeddings, it is not loaded
        # again: the model would go on with a new body and the old, packed head.
        return (
            "on a CPU, vLLM would keep the old head of a model whose head is tied to its embeddings; open a copy that "
            "is saved with tie_word_embeddings=False and a head (lm_head.weight) of its own, or use another engine"
        )
    return ""
