"""`CausalLM`: what this plugin needs of a transformers model, and the only file that knows how to ask for it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from corelm.errors import CapabilityError
from corelm.spec import Ragged, Side

#: Models that take a cache and keep a part of what they have read in their modules. There rows cannot be expanded to
#: several answers or leave when they end: the log-probs would be wrong, and nothing would say so.
STATEFUL = frozenset({"recurrent_gemma"})


class CausalLM:
    """A model as a function of rows of ids.

    Attributes:
        module: what is called, PEFT wrapper included. base: the transformers model inside it.
        vocab_size: width of the logits. max_context: longest input, or None where the model states none.
        eos_token_ids: the ids its generation config ends an answer with; everything else in there is ignored.
    """

    def __init__(self, module: nn.Module, base: Any) -> None:
        self.module = module
        self.base = base
        text = base.config.get_text_config()
        head = base.get_output_embeddings()
        self.vocab_size: int = text.vocab_size if head is None else head.weight.shape[0]
        self.max_context: int | None = getattr(text, "max_position_embeddings", None)
        self.eos_token_ids = _eos_token_ids(base.generation_config)
        #: Above so many tokens in a forward pass all of its positions are encoded in another way; None for most models.
        self.rope_switch = _rope_switch(text)
        self._accepted = inspect.signature(base.forward).parameters.keys()
        # The auxiliary loss of experts is nobody's here, and with a cache its mask does not fit.
        quiet = {"output_router_logits": False} if "output_router_logits" in self._accepted else {}
        self._always = {"return_dict": True, **quiet}
        # State-space models call it cache_params.
        caches = [] if base.config.model_type in STATEFUL else ["past_key_values", "cache_params"]
        self._cache_name = next((name for name in caches if name in self._accepted), None)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.base.device
        return device

    @property
    def accepts_positions(self) -> bool:
        """Whether forward is told where in its row a token stands."""
        return "position_ids" in self._accepted

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients and no dropout inside; every submodule's own train/eval mode afterwards, whatever happened."""
        in_training = [module for module in self.module.modules() if module.training]
        if in_training:
            self.module.eval()
        try:
            # A caller's inference_mode would make tensors that no later computation may use.
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            for module in in_training:
                module.training = True

    def new_cache(self) -> Any:
        """An empty cache of the kind the model's layers need (attention, sliding windows, recurrent states)."""
        from transformers_backend.cache import new_cache

        return new_cache(self.base.config)

    def inputs(self, rows: Ragged, side: Side) -> dict[str, Tensor]:
        """`rows` with padding on that side: `input_ids`, `attention_mask` and `position_ids`, each int64[rows, width].

        The mask comes from the lengths: a prompt may contain the id that pads.
        """
        mask = rows.mask(side).to(self.device, torch.int64)
        return {
            "input_ids": rows.to_padded(0, side).to(self.device),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
        }

    def forward(self, attention_mask: Tensor | None, position_ids: Tensor, **inputs: Any) -> Any:
        """The model's own output. A mask of ones is left out, which lets attention take its fast path."""
        if attention_mask is not None and not bool(attention_mask.all()):
            inputs["attention_mask"] = attention_mask
        if self.accepts_positions:
            inputs["position_ids"] = position_ids
        return self.module(**self._always, **inputs)

    def next_logits(self, cache: Any, attention_mask: Tensor | None, **inputs: Any) -> Tensor:
        """float32[rows, vocab] of what follows the last column; `cache` is extended by `inputs`.

        `attention_mask` is over all columns so far; None where no row is padded.

        Raises:
            CapabilityError: the model's forward takes no cache that we know.
        """
        if self._cache_name is None:
            raise CapabilityError(
                f"{type(self.base).__name__} has no cache to decode with, so it can score but not generate",
                capability="generate",
            )
        if attention_mask is not None and self._cache_name == "cache_params":
            # A recurrent state has taken the past in: here the mask is of the new columns alone.
            attention_mask = attention_mask[:, -inputs["input_ids"].shape[1] :]
        keep = {"logits_to_keep": 1} if "logits_to_keep" in self._accepted else {}
        inputs |= {self._cache_name: cache, "use_cache": True, **keep}
        logits: Tensor = self.forward(attention_mask=attention_mask, **inputs).logits
        return logits[:, -1].float()


class Deadline:
    """When a call has to be over."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def check(self) -> None:
        """Raises:
        TimeoutError: the time is over.
        """
        if self._end is not None and time.monotonic() > self._end:
            raise TimeoutError(f"not done within {self.timeout} s; allow more time or ask for less at once")


def micro_batches(lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Rows that share a forward pass, int64[n] each: similar lengths together, longest first, padding counted.

    Lengths ``[2, 9, 3, 9]`` with 18 tokens give ``[1, 3]`` and ``[2, 0]``. A row longer than `max_tokens` goes alone.
    """
    order = lengths.argsort(descending=True, stable=True)
    while len(order):
        # The longest comes first, so that what does not fit into memory fails at once.
        rows = max(1, max_tokens // max(1, int(lengths[order[0]])))
        yield order[:rows]
        order = order[rows:]


def one_encoding(lengths: Tensor, rope_switch: int | None) -> Iterator[Tensor]:
    """Rows that may share a forward pass without changing how positions are encoded in one another, int64[n] each."""
    if rope_switch is None:
        yield torch.arange(len(lengths))
        return
    for side in (lengths <= rope_switch, lengths > rope_switch):
        if bool(side.any()):
            yield side.nonzero()[:, 0]


def _rope_switch(config: Any) -> int | None:
    """Where longrope (Phi-3) goes from its short to its long factors ("LongRoPE", Ding et al. 2024)."""
    rope = getattr(config, "rope_parameters", None) or {}
    layers = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    switches = [each["original_max_position_embeddings"] for each in layers if each.get("rope_type") == "longrope"]
    return switches[0] if switches else None


def _eos_token_ids(config: Any) -> frozenset[int]:
    eos = None if config is None else config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])
