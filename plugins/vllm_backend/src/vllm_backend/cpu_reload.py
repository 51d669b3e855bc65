"""Weights that vLLM on a CPU cannot load again, recognised in a server behind a URL."""

from __future__ import annotations

from typing import Any

#: The fields of a model's configuration that give its number of experts, as vLLM looks for them.
_NUMBERS_OF_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def answers_wrongly_afterwards(model: Any, device: str | None) -> bool:
    """Return whether a server would answer wrongly after it has loaded weights again, as far as can be known.

    On a CPU, vLLM keeps the old head if it is tied to the embeddings, and a mixture of experts answers with neither the
    old weights nor the new ones (see `capabilities.read_model`).

    Args:
        model: the configuration of the model; None if it cannot be read on this machine.
        device: what the server runs on; None if it does not tell.
    """
    if model is None or device != "cpu":
        return False
    text = model.get_text_config()
    experts = any(getattr(text, name, 0) for name in _NUMBERS_OF_EXPERTS)
    return bool(experts or getattr(text, "tie_word_embeddings", False))
