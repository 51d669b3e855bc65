"""Faults that show only where a model is not run by its plain forward: each function puts one into a model like Llama.

The plain forward of one row, without padding, mask, positions and cache, is what it was, or is itself what is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from helpers.plain_forward import cache_in


def _wrap(part: Any, change: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Replace the forward of a module by ``change(forward, args, kwargs)``."""
    plain = part.forward
    part.forward = lambda *args, **kwargs: change(plain, args, kwargs)


def leaking_mask(model: Any) -> None:
    """Each query gives one masked column a weight of about 1e-3."""

    def attend(plain: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.shape[-1] > 1:
            allowed = mask if mask.dtype is torch.bool else mask >= 0
            hidden = ~allowed.any(dim=-2, keepdim=True)
            leak = hidden & (hidden.cumsum(-1) == 1)
            dtype = next(model.parameters()).dtype
            bias = torch.zeros(allowed.shape, dtype=dtype, device=mask.device).masked_fill(
                ~allowed, torch.finfo(dtype).min
            )
            kwargs["attention_mask"] = torch.where(leak, torch.tensor(math.log(1e-3), dtype=dtype), bias)
        return plain(*args, **kwargs)

    for layer in model.model.layers:
        _wrap(layer.self_attn, attend)


def positions_off_by_one(model: Any) -> None:
    """Later tokens of a row with positions are one further from the first than they should be."""

    def shift(plain: Any, args: Any, kwargs: Any) -> Any:
        positions = kwargs.get("position_ids")
        if positions is not None:
            kwargs["position_ids"] = positions + (positions > 0)
        return plain(*args, **kwargs)

    _wrap(model.model, shift)


def positions_of_cached_steps_off_by_one(model: Any) -> None:
    def shift(plain: Any, args: Any, kwargs: Any) -> Any:
        past = cache_in(kwargs)
        if past is not None and past.get_seq_length() > 0:
            kwargs["position_ids"] = kwargs["position_ids"] + 1
        return plain(*args, **kwargs)

    _wrap(model.model, shift)


def row_reads_its_neighbour(model: Any) -> None:
    def mix(plain: Any, args: Any, kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state.lerp(out.last_hidden_state.roll(1, 0), 1e-3)
        return out

    _wrap(model.model, mix)


def token_reads_its_neighbour_in_a_pack(model: Any) -> None:
    """Where positions begin anew in a row, the first token of the next one reads the last of the one before."""

    def mix(plain: Any, args: Any, kwargs: Any) -> Any:
        out, positions = plain(*args, **kwargs), kwargs.get("position_ids")
        if positions is not None and positions.shape[1] > 1:
            states = out.last_hidden_state
            again = (positions[:, 1:] < positions[:, :-1])[..., None]
            first = states[:, 1:] + 1e-3 * again * states[:, :-1]
            out.last_hidden_state = torch.cat([states[:, :1], first.to(states.dtype)], dim=1)
        return out

    _wrap(model.model, mix)


def bias_skipped_for_the_last_logits(model: Any) -> None:
    """The model adds a bias after its head, but not if it is asked for the logits of the last positions only."""
    bias = torch.linspace(-1.0, 1.0, model.config.vocab_size)

    def add(plain: Any, args: Any, kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if not kwargs.get("logits_to_keep"):
            out.logits = out.logits + bias.to(out.logits)
        return out

    _wrap(model, add)


def cap_skipped_for_few_logits(model: Any) -> None:
    """The model caps its logits, but not those of a single column."""

    def cap(plain: Any, args: Any, kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        alone = kwargs["input_ids"].shape[1] == 1 and cache_in(kwargs) is None
        if out.logits.shape[1] != 1 or alone:
            out.logits = 5.0 * torch.tanh(out.logits / 5.0)
        return out

    _wrap(model, cap)


def rope_by_the_length_of_the_batch(model: Any) -> None:
    """A pass of more than 24 columns turns all positions by another angle, as dynamic NTK scaling does."""

    def scale(plain: Any, args: Any, kwargs: Any) -> Any:
        positions = kwargs["position_ids"]
        kwargs["position_ids"] = positions * (0.5 if int(positions.max()) >= 24 else 1.0)
        return plain(*args, **kwargs)

    _wrap(model.model.rotary_emb, scale)


def expert_capacity_of_a_batch(model: Any) -> None:
    """The experts of each layer take the first 24 tokens of a pass only."""

    def take(plain: Any, args: Any, kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        first = torch.arange(made.shape[0] * made.shape[1]) < 24
        return made * first.view(*made.shape[:2], 1).to(made)

    for layer in model.model.layers:
        _wrap(layer.mlp, take)


def cache_without_a_first_token(model: Any) -> None:
    """The cache of the second layer loses the first token of each row after the prompt was read."""

    def drop(plain: Any, args: Any, kwargs: Any) -> Any:
        out, past = plain(*args, **kwargs), cache_in(kwargs)
        if past is not None and out.last_hidden_state.shape[1] > 1:
            past.layers[1].values[:, :, 0] = 0.0
        return out

    _wrap(model.model, drop)


def noise(model: Any) -> None:
    def add(plain: Any, args: Any, kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state + 1e-2 * torch.randn_like(out.last_hidden_state)
        return out

    _wrap(model.model, add)


#: All but `noise`, after which no number can be right.
PLANTS: tuple[Callable[[Any], None], ...] = (
    leaking_mask,
    positions_off_by_one,
    positions_of_cached_steps_off_by_one,
    row_reads_its_neighbour,
    token_reads_its_neighbour_in_a_pack,
    bias_skipped_for_the_last_logits,
    cap_skipped_for_few_logits,
    rope_by_the_length_of_the_batch,
    expert_capacity_of_a_batch,
    cache_without_a_first_token,
)
