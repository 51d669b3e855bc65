"""Faults that show only where a model is not run by its plain forward: each function puts one into a model like Llama.

The plain forward of one row, without padding, mask, positions and cache, is what it was, or is itself what is right.
`check` compares a backend with the model in float64, which has the same fault: no log-prob may be further off than
twice what the plain forward is in the model's own dtype.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from corelm import Backend
from helpers.plain_forward import Rows, cache_in


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


def cache_of_an_earlier_call(model: Any) -> None:
    """The cache has the first token of the very first prompts."""
    kept: list[Tensor] = []

    def mix(plain: Any, args: Any, kwargs: Any) -> Any:
        out, past = plain(*args, **kwargs), cache_in(kwargs)
        if past is not None and out.last_hidden_state.shape[1] > 1:
            first = [layer.values[:, :, 0] for layer in past.layers]
            if not kept:
                kept.extend(each[-1].clone() for each in first)
            for each, stale in zip(first, kept, strict=True):
                each.copy_(stale)
        return out

    _wrap(model.model, mix)


def window_of_cached_steps_one_short(model: Any) -> None:
    """Where a cached step reads more than 24 tokens, it misses one of them."""

    def attend(plain: Any, args: Any, kwargs: Any) -> Any:
        past, states = cache_in(kwargs), kwargs["hidden_states"]
        count = 0 if past is None else int(past.get_seq_length(plain.__self__.layer_idx)) + 1
        if count > 24 and states.shape[1] == 1:
            mask = kwargs.get("attention_mask")
            # Buffers of a fixed shape have columns that are not written yet.
            seen = torch.arange(count if mask is None else mask.shape[-1], device=states.device) != count - 24
            if mask is None or mask.dtype is torch.bool:
                kwargs["attention_mask"] = seen.expand(len(states), 1, 1, -1) if mask is None else mask & seen
            else:
                kwargs["attention_mask"] = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
        return plain(*args, **kwargs)

    for layer in model.model.layers:
        _wrap(layer.self_attn, attend)


def columns_for_positions(model: Any) -> None:
    """Where rows are padded, tokens are numbered by columns."""

    def number(plain: Any, args: Any, kwargs: Any) -> Any:
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if positions is not None and mask is not None:
            kwargs["position_ids"] = torch.arange(mask.shape[1], device=mask.device)[None, -positions.shape[1] :]
        return plain(*args, **kwargs)

    _wrap(model.model, number)


def attention_scaled_by_the_batch(model: Any) -> None:
    """Attention is sharper by a hundredth where several rows are read together."""

    def sharpen(plain: Any, args: Any, kwargs: Any) -> Any:
        part, several = plain.__self__, kwargs["hidden_states"].shape[0] > 1
        scaling = part.scaling
        part.scaling = scaling * (1.01 if several else 1.0)
        try:
            return plain(*args, **kwargs)
        finally:
            part.scaling = scaling

    for layer in model.model.layers:
        _wrap(layer.self_attn, sharpen)


def head_of_8_bits_for_many_rows(model: Any) -> None:
    """The head's weights have 8 bits where more than four rows are read together."""

    def multiply(plain: Any, args: Any, kwargs: Any) -> Any:
        weight, (states,) = model.lm_head.weight, args
        if len(states) <= 4 or states.ndim < 3:
            return plain(states)
        step = weight.abs().amax(1, keepdim=True) / 127
        return functional.linear(states, (weight / step).round() * step)

    _wrap(model.lm_head, multiply)


def states_of_a_pack_shifted(model: Any) -> None:
    """Where positions begin anew in a row, each token has the state of the one before."""

    def shift(plain: Any, args: Any, kwargs: Any) -> Any:
        out, positions = plain(*args, **kwargs), kwargs.get("position_ids")
        if positions is not None and bool((positions[:, 1:] < positions[:, :-1]).any()):
            out.last_hidden_state = out.last_hidden_state.roll(1, 1)
        return out

    _wrap(model.model, shift)


def values_cached_in_8_bits(model: Any) -> None:
    """The cache keeps two bits of the fraction of each value of a prompt."""

    def shorten(plain: Any, args: Any, kwargs: Any) -> Any:
        out, past = plain(*args, **kwargs), cache_in(kwargs)
        if past is not None and out.last_hidden_state.shape[1] > 1:
            for layer in past.layers:
                layer.values.copy_(layer.values.to(torch.float8_e5m2))
        return out

    _wrap(model.model, shorten)


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
    cache_of_an_earlier_call,
    window_of_cached_steps_one_short,
    columns_for_positions,
    attention_scaled_by_the_batch,
    head_of_8_bits_for_many_rows,
    states_of_a_pack_shifted,
    values_cached_in_8_bits,
)


def check(backend: Backend, model: Any, exact: Any, rows: Rows, prompts: Rows, length: int) -> None:
    """Check the scores of rows, and the log-probs of sampled answers of this length.

    Args:
        model: what the backend runs.
        exact: the same in a longer dtype.
    """
    scores = backend.score_logprobs(rows).logprobs.split()
    _check("scores", [each[1:] for each in scores], [[_at_once(each, row) for row in rows] for each in (model, exact)])
    made = backend.generate(
        prompts, {"max_new_tokens": length, "ignore_eos": True}, seeds=list(range(1, len(prompts) + 1))
    )
    assert made.logprobs is not None
    sequences = [(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, made.ids.tolist(), strict=True)]
    plain = [[_step_by_step(each, *sequence) for sequence in sequences] for each in (model, exact)]
    _check("answers", list(made.logprobs.split()), plain)


def _check(what: str, found: list[Tensor], plain: list[list[Tensor]]) -> None:
    own, exact = (torch.cat(each) for each in plain)
    off, allowed = (float((each - exact).square().mean().sqrt()) for each in (torch.cat(found).double().cpu(), own))
    assert off <= 2 * allowed + 1e-5, (what, off, allowed)


def _at_once(model: Any, row: Sequence[int]) -> Tensor:
    """Return the log-probs of a row's tokens but the first, float64, from one plain forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row[:-1]], device=model.device)).logits[0]
    return logits.double().log_softmax(-1).cpu()[torch.arange(len(row) - 1), torch.tensor(row[1:])]


def _step_by_step(model: Any, row: Sequence[int], start: int) -> Tensor:
    """Return the log-probs of a row's tokens from `start` on, each from the plain forward of what comes before it."""
    return torch.stack([_at_once(model, row[: end + 1])[-1] for end in range(start, len(row))])
