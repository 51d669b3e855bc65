"""Subtract a per-token penalty from rewards: per token or per sequence, dense or one row per sample."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from corelm.containers.classes import PerToken
from corelm.containers.fields import flat, rows
from corelm.containers.keys import list_keys
from corelm.errors import InvalidRequestError, MissingKeyError, refuse
from corelm.kl.layout import TokenLayout
from corelm.tensors.ragged import Ragged


def subtract_penalty(td: TensorDictBase, key: NestedKey, penalty: Tensor, layout: TokenLayout) -> Any:
    """Return the reward under `key` minus the flat `penalty`, in the layout and dtype of the reward.

    =========================================== ==========================================================
    shape of the reward                         what is subtracted
    =========================================== ==========================================================
    ``[*batch]``, ``[*batch, 1]``, …            the sum of the penalty over the row
    ``[*batch, width]``, ``[*batch, width, 1]`` the penalty of each token
    one row per sample: bare, or a `PerToken`   the penalty of each token; from a single number, the sum
    =========================================== ==========================================================

    `width` is that of ``tokens.full``; if the tokens are rows of different lengths, the width that ``pad_output=True``
    would give them.

    Raises:
        MissingKeyError: `td` has no such key.
        InvalidRequestError: the reward has none of these shapes; `rows` lists the rows at fault.
    """
    if key not in td.keys(include_nested=True):
        raise MissingKeyError(
            f"the TensorDict has no {key!r} to subtract the penalty from; it has: {list_keys(td)}. Write it, or leave "
            "rewards unchanged: KLComputation or RetrieveKL with add_to_reward=False",
            field=str(key),
        )
    try:
        reward = td.get(key)
    except RuntimeError:
        # Bare rows of different lengths, which only a lazy stack can hold.
        reward = [row.get(key) for row in rows(td)]
    if isinstance(reward, PerToken):
        given, reduced = reward.full, reward.clone(False)
        dense = isinstance(given, Tensor) and reward.padded
        reduced.full = _dense(given, key, penalty, layout) if dense else _rows(flat(given), key, penalty, layout)
        return reduced
    if isinstance(reward, list):
        return _rows(reward, key, penalty, layout)
    if not isinstance(reward, Tensor):
        raise InvalidRequestError(f"{key!r}: expected a tensor, got {type(reward).__name__}", field=str(key))
    return _dense(reward, key, penalty, layout)


def store_reward(td: TensorDictBase, key: NestedKey, value: Any) -> None:
    """Store the result of `subtract_penalty`; a list is stored row by row."""
    if not isinstance(value, list):
        td.set(key, value)
        return
    for row, one in zip(rows(td), value, strict=True):
        row.set(key, one)


def _dense(reward: Tensor, key: NestedKey, penalty: Tensor, layout: TokenLayout) -> Tensor:
    batch, shape = layout.batch, tuple(reward.shape)
    penalty = penalty.to(reward.device)
    if shape[: len(batch)] == batch and math.prod(shape[len(batch) :]) == 1:
        return _minus(reward, layout.row_sums(penalty))
    width = layout.columns.shape[-1]
    if shape in ((*batch, width), (*batch, width, 1)):
        return _minus(reward, layout.dense(penalty))
    raise InvalidRequestError(
        f"{key!r}: expected one reward per sequence, {list(batch)} or {[*batch, 1]}, or one per token of tokens.full, "
        f"{[*batch, width]} or {[*batch, width, 1]}; got {list(shape)}",
        field=str(key),
    )


def _rows(given: list[Tensor], key: NestedKey, penalty: Tensor, layout: TokenLayout) -> list[Tensor]:
    """Subtract the penalty from rewards given row by row."""
    count = math.prod(layout.batch)
    if len(given) != count:
        raise InvalidRequestError(
            f"{key!r}: got {len(given)} rows of rewards for {count} rows of tokens", field=str(key)
        )
    lengths = layout.lengths.tolist()
    bad = {
        row: f"expected {length} rewards, one per token of tokens.full, or a single reward; got {list(reward.shape)}"
        for row, (reward, length) in enumerate(zip(given, lengths, strict=True))
        if reward.numel() not in (1, length) or reward.ndim > 2
    }
    refuse(bad, str(key))
    parts = Ragged(penalty, layout.lengths).split()
    return [
        _minus(reward, (part if reward.numel() == len(part) else part.sum()).to(reward.device))
        for reward, part in zip(given, parts, strict=True)
    ]


def _minus(reward: Tensor, penalty: Tensor) -> Tensor:
    """Return ``reward − penalty`` as a new tensor; rewards that are not floats become float32."""
    dtype = reward.dtype if reward.dtype.is_floating_point else penalty.dtype
    finer = torch.promote_types(dtype, penalty.dtype)
    return (reward.to(finer) - penalty.reshape(reward.shape)).to(dtype)
