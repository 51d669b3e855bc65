"""`CausalLM`: drives a transformers model in this process. Only this file knows how to call the model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from corelm.errors import CapabilityError
from corelm.spec import Ragged, Side

#: Model types that take a cache but also keep part of what they have read in their modules. Expanding a row to several
#: answers, or dropping a row that has ended, would silently give wrong log-probs.
STATEFUL = frozenset({"recurrent_gemma"})


class CausalLM:
    """A model as a function of rows of ids.

    Attributes:
        module: the module to call, PEFT wrapper included.
        base: the transformers model inside `module`.
        vocab_size: width of the logits.
        max_context: longest input in tokens, or None if the model states no limit.
        rope_switch: number of tokens in a forward pass above which all positions are encoded differently (longrope);
            None for most models.
    """

    def __init__(self, module: nn.Module, base: Any) -> None:
        self.module = module
        self.base = base
        text = base.config.get_text_config()
        head = base.get_output_embeddings()
        self.vocab_size: int = text.vocab_size if head is None else head.weight.shape[0]
        self.max_context: int | None = getattr(text, "max_position_embeddings", None)
        self.rope_switch = _rope_switch(text)
        self._accepted = inspect.signature(base.forward).parameters.keys()
        # Nothing here uses the auxiliary loss of mixture-of-experts models, and with a cache its mask does not fit.
        without_router = {"output_router_logits": False} if "output_router_logits" in self._accepted else {}
        self._always = {"return_dict": True, **without_router}
        # State-space models call their cache cache_params.
        caches = [] if base.config.model_type in STATEFUL else ["past_key_values", "cache_params"]
        self._cache_name = next((name for name in caches if name in self._accepted), None)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.base.device
        return device

    @property
    def accepts_positions(self) -> bool:
        """Whether the model's forward takes `position_ids`."""
        return "position_ids" in self._accepted

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Turn gradients and dropout off inside; restore the train/eval mode of every submodule afterwards."""
        in_training = [module for module in self.module.modules() if module.training]
        if in_training:
            self.module.eval()
        try:
            # If the caller is in inference_mode, results would be tensors that no later computation can use.
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            for module in in_training:
                module.training = True

    def inputs(self, rows: Ragged, side: Side) -> dict[str, Tensor]:
        """Return `rows` padded on that side: `input_ids`, `attention_mask`, `position_ids`, each int64[rows, width].

        The mask is made from the lengths, because a prompt may contain the padding id.
        """
        mask = rows.mask(side).to(self.device, torch.int64)
        return {
            "input_ids": rows.to_padded(0, side).to(self.device),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
        }

    def forward(self, attention_mask: Tensor | None, position_ids: Tensor, **inputs: Any) -> Any:
        """Return the model's own output. A mask of ones is left out, so that attention can take its fast path."""
        if attention_mask is not None and not bool(attention_mask.all()):
            inputs["attention_mask"] = attention_mask
        if self.accepts_positions:
            inputs["position_ids"] = position_ids
        return self.module(**self._always, **inputs)

    def padded_logits(self, rows: Ragged) -> Tensor:
        """Return the logits of all positions of `rows`, ``[rows, width, vocab]``, padded on the right."""
        logits: Tensor = self.forward(use_cache=False, **self.inputs(rows, "right")).logits
        return logits

    def next_logits(self, cache: Any, attention_mask: Tensor | None, **inputs: Any) -> Tensor:
        """Return float32[rows, vocab]: the logits that follow the last column. `cache` is extended by `inputs`.

        Args:
            cache: a transformers cache.
            attention_mask: int64[rows, columns] over all columns so far; None if no row is padded.

        Raises:
            CapabilityError: the model's forward takes no known kind of cache.
        """
        if self._cache_name is None:
            raise CapabilityError(
                f"{type(self.base).__name__} has no cache to decode with, so it can score but not generate",
                capability="generate",
            )
        if attention_mask is not None and self._cache_name == "cache_params":
            # A recurrent state already holds the past, so its mask covers the new columns only.
            attention_mask = attention_mask[:, -inputs["input_ids"].shape[1] :]
        keep = {"logits_to_keep": 1} if "logits_to_keep" in self._accepted else {}
        inputs |= {self._cache_name: cache, "use_cache": True, **keep}
        logits: Tensor = self.forward(attention_mask=attention_mask, **inputs).logits
        return logits[:, -1].float()


def _rope_switch(config: Any) -> int | None:
    """Return where longrope (Phi-3) goes from its short to its long factors ("LongRoPE", Ding et al. 2024)."""
    rope = getattr(config, "rope_parameters", None) or {}
    layers = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    switches = [each["original_max_position_embeddings"] for each in layers if each.get("rope_type") == "longrope"]
    return switches[0] if switches else None
