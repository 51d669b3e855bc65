"""Memory on a GPU: how much of it decoding may take, what is said when it is full, and how a model gives it back.

`SleepingWeights` moves a model's weights off the accelerator, or drops them, and brings them back.
"""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from corelm.errors import EngineError
from corelm.spec import SLEEP_LEVELS, Ragged
from transformers_backend.continuation import CachedRows
from transformers_backend.engine import CausalLM

#: Tokens that share a forward pass where nothing else is said: on a CPU, and in scoring, which keeps no cache.
DEFAULT_TOKENS = 32768
#: Share of the free memory that decoding may take. The rest is for what is not counted, and for fragmentation.
_SHARE = 0.5
#: A buffer of keys and values has room for more than it holds, and is copied when it is full.
_CACHE_ROOM = 1.5
#: Values of a token that a layer holds at once while it reads prompts, in hidden and in intermediate sizes.
_HIDDENS, _INTERMEDIATES = 16, 4
#: Bytes that the sampler takes for a logit: float32 copies, and the float64 sums and indices of a sort.
_LOGIT_BYTES = 48
#: Lengths at which a cache is measured.
_SHORT, _LONG = 8, 16


@dataclass(frozen=True)
class DecodingLimits:
    """How many rows are decoded at a time.

    Attributes:
        tokens: how many tokens, with padding and the answers to come.
        row_tokens: how many tokens a row counts in addition to its own, for its logits and recurrent states.
    """

    tokens: int
    row_tokens: int = 0


@dataclass(frozen=True)
class CacheBytes:
    """The bytes of a row in a cache: ``row + token · length``, or fewer for a row longer than 16 tokens."""

    row: int
    token: int


def decoding_limits(engine: CausalLM, cache: CacheBytes | None, longest_prompt: int) -> DecodingLimits:
    """Return what fits into the memory that is free now; `DEFAULT_TOKENS` if the model is not on GPUs.

    A model on several GPUs is treated as if all its caches were on the fullest of them. `cache` is None if
    that is not known, and `longest_prompt` is in tokens.
    """
    devices = {each.device for each in engine.module.parameters() if each.device.type == "cuda"}
    if not devices or cache is None:
        return DecodingLimits(DEFAULT_TOKENS)
    # With those bytes that PyTorch has reserved and does not use.
    free = (
        torch.cuda.mem_get_info(each)[0] + torch.cuda.memory_reserved(each) - torch.cuda.memory_allocated(each)
        for each in devices
    )
    return limits_within(min(free), engine, cache, longest_prompt)


def limits_within(free: int, engine: CausalLM, cache: CacheBytes, longest_prompt: int) -> DecodingLimits:
    """Return what fits into so many free bytes, rounded down to a power of two.

    Without that rounding every change of the free memory would change which rows share a batch, and so the rounding of
    bfloat16 log-probs.
    """
    token_bytes = math.ceil(_CACHE_ROOM * cache.token) + _reading_bytes(engine, longest_prompt)
    row_bytes = math.ceil(_CACHE_ROOM * cache.row) + _LOGIT_BYTES * engine.vocab_size
    tokens = max(1, int(_SHARE * free) // token_bytes)
    return DecodingLimits(2 ** (tokens.bit_length() - 1), math.ceil(row_bytes / token_bytes))


def measured_cache(engine: CausalLM) -> CacheBytes | None:
    """Return the bytes that the model's caches take, measured on two short rows; None if the model cannot read them.

    Windows and recurrent states make a cache grow ever more slowly, so the line through two lengths is at or above the
    size of every longer row.
    """
    if not engine.accepts_cache:
        return CacheBytes(0, 0)
    sizes = []
    try:
        for length in (_SHORT, _LONG):
            rows = CachedRows(engine, Ragged.from_list([torch.arange(length) % engine.readable]))
            sizes.append(_bytes_of(rows.cache))
    except Exception:
        # Whatever is wrong shows in the request itself, with the model's own words.
        return None
    token = math.ceil((sizes[1] - sizes[0]) / (_LONG - _SHORT))
    return CacheBytes(max(0, sizes[0] - _SHORT * token), token)


@contextmanager
def naming_max_batch_tokens(engine: CausalLM) -> Iterator[None]:
    """Say what to do if the GPU's memory is full, and release what the failed computation held.

    Raises:
        EngineError: the memory of the GPU is full.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The frames hold the caches for as long as somebody holds the exception.
        traceback.clear_frames(error.__traceback__)
        give_back(engine.device)
        reason = str(error).partition("\n")[0]
    else:
        return
    raise EngineError(
        f"the memory of {engine.device} is full: {reason} Open the backend with a smaller max_batch_tokens=, or send "
        "shorter rows",
        usable=True,
    )


def give_back(device: torch.device) -> None:
    """Free what only cycles hold, and return to the GPU what PyTorch keeps for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _reading_bytes(engine: CausalLM, columns: int) -> int:
    """Return an upper bound of the bytes that reading a token of a prompt takes, apart from its cache."""
    config, size = engine.base.config.get_text_config(), engine.base.dtype.itemsize
    # Not from the configuration, where the names of these two differ.
    hidden = engine.base.get_input_embeddings().weight.shape[-1]
    intermediates = [
        getattr(config, name, None) for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner")
    ]
    widest = max([4 * hidden, *(each for each in intermediates if isinstance(each, int))])
    experts = getattr(config, "num_experts_per_tok", None) or 1
    # Only eager attention keeps its scores, one float32 and one short float a head; the others need at most a mask.
    # No model has heads of fewer than 16.
    heads = getattr(config, "num_attention_heads", None) or hidden // 16
    eager = config._attn_implementation == "eager"
    scores = columns * (6 * heads if eager else 4)
    logits = 0 if engine.keeps_last_logits else (size + 4) * engine.vocab_size
    return size * (_HIDDENS * hidden + _INTERMEDIATES * widest * experts) + scores + logits


def _bytes_of(cache: Any) -> int:
    """Return what the layers of a cache hold; recurrent states are in dictionaries or lists."""
    held = [value for layer in cache.layers for value in vars(layer).values()]
    held += [state for value in held if isinstance(value, dict) for state in value.values()]
    held += [state for value in held if isinstance(value, (list, tuple)) for state in value]
    return sum(value.nbytes for value in held if isinstance(value, Tensor))


class SleepingWeights:
    """Where the weights of a model were before it fell asleep.

    Level 2 leaves them without memory. After it they are NaN until an update writes them, so that a weight which no
    update has written cannot make a number.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._devices: dict[Tensor, torch.device] = {}

    def sleep(self, level: int) -> None:
        """Free the memory of the accelerator. Buffers, which no update brings back, are kept at every level."""
        self._devices = {each: each.device for each in chain(self._module.parameters(), self._module.buffers())}
        for each in self._devices:
            if level == 1 or not isinstance(each, nn.Parameter):
                each.data = each.data.cpu()
            else:
                # One element that stands for all of them keeps the shape.
                each.data = each.data.new_full((), torch.nan).expand(each.shape)

    def wake(self) -> None:
        """Take the memory again."""
        for each, device in self._devices.items():
            there = each.data.to(device)
            # Buffers may be views of one another, or of one element.
            each.data = there.contiguous() if isinstance(each, nn.Parameter) else there
        self._devices = {}


def sleep_levels(module: nn.Module, owns_model: bool) -> frozenset[int]:
    """Return the levels at which a model can sleep: none if its owner holds it, or if its weights are not plain ones.

    The program that made a model moves it by itself. Weights that are quantized hold more than their data, and those
    that are offloaded are elsewhere already.
    """
    weights = list(module.parameters())
    plain = all(type(each) is nn.Parameter and each.is_floating_point() and not each.is_meta for each in weights)
    if not (owns_model and weights and plain):
        return frozenset()
    # An update of the base weights would leave the adapters of a PEFT model without theirs.
    return frozenset({1} if getattr(module, "peft_config", None) else SLEEP_LEVELS)
