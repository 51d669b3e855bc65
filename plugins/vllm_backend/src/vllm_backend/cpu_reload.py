"""Weights that vLLM on a CPU cannot load again (seen with vLLM 0.32)."""

from __future__ import annotations

from typing import Any

#: The fields of a model's configuration that give its number of experts, as vLLM looks for them.
_NUMBERS_OF_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def obstacle(text: Any, device: str | None, has_experts: bool = False) -> str:
    """Return why vLLM would answer wrongly after it has loaded weights again, and what to do; "" if it would not.

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
