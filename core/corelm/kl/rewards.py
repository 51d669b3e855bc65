"""A reward less a penalty, whatever the reward is of: tokens or sequences, dense or one row a sample."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from corelm.containers.classes import PerToken
from corelm.containers.field_access import flat, rows
from corelm.errors import InvalidRequestError, MissingKeyError, refuse
from corelm.kl.layout import TokenLayout, listing
from corelm.tensors.ragged import Ragged


def penalised(td: TensorDictBase, key: NestedKey, penalty: Tensor, layout: TokenLayout) -> Any:
    """The reward under `key` less the flat `penalty`, in the form and dtype of the reward.

    =========================================== ========================================
    a reward of shape                           loses
    =========================================== ========================================
    ``[*batch]``, ``[*batch, 1]``, …            the sum over the row
    ``[*batch, width]``, ``[*batch, width, 1]`` each token its own
    a row a sample: bare, or in a `PerToken`    each token its own; one number, the sum
    =========================================== ========================================

    `width` is that of ``tokens.full``; beside rows of their own length it is what ``pad_output=True`` would give.

    Raises:
        MissingKeyError: there is no reward.
        InvalidRequestError: its shape is none of these; `rows` says of which rows.
    """
    if key not in td.keys(include_nested=True):
        raise MissingKeyError(
            f"there is no {key!r} to take the penalty from; there are: {listing(td)}. Pass add_to_reward=False to "
            "leave rewards alone",
            field=str(key),
        )
    try:
        reward = td.get(key)
    except RuntimeError:
        # Bare rows of different lengths: only a stack of rows holds such.
        reward = [row.get(key) for row in rows(td)]
    if isinstance(reward, PerToken):
        given, less = reward.full, reward.clone(False)
        dense = isinstance(given, Tensor) and reward.padded
        less.full = _dense(given, key, penalty, layout) if dense else _each(flat(given), key, penalty, layout)
        return less
    if isinstance(reward, list):
        return _each(reward, key, penalty, layout)
    if not isinstance(reward, Tensor):
        raise InvalidRequestError(f"{key!r}: expected a tensor, got {type(reward).__name__}", field=str(key))
    return _dense(reward, key, penalty, layout)


def put(td: TensorDictBase, key: NestedKey, value: Any) -> None:
    """Store what `penalised` gave; a list goes row by row."""
    if not isinstance(value, list):
        td.set(key, value)
        return
    for row, one in zip(rows(td), value, strict=True):
        row.set(key, one)


def _dense(reward: Tensor, key: NestedKey, penalty: Tensor, layout: TokenLayout) -> Tensor:
    batch, shape = layout.batch, tuple(reward.shape)
    penalty = penalty.to(reward.device)
    if shape[: len(batch)] == batch and math.prod(shape[len(batch) :]) == 1:
        return _less(reward, layout.row_sums(penalty))
    width = layout.columns.shape[-1]
    if shape in ((*batch, width), (*batch, width, 1)):
        return _less(reward, layout.dense(penalty))
    raise InvalidRequestError(
        f"{key!r}: expected a reward a sequence, {list(batch)} or {[*batch, 1]}, or one a token of tokens.full, "
        f"{[*batch, width]} or {[*batch, width, 1]}; got {list(shape)}",
        field=str(key),
    )


def _each(given: list[Tensor], key: NestedKey, penalty: Tensor, layout: TokenLayout) -> list[Tensor]:
    """Rewards row by row."""
    count = math.prod(layout.batch)
    if len(given) != count:
        raise InvalidRequestError(f"{key!r}: {len(given)} rows of rewards for {count} of tokens", field=str(key))
    lengths = layout.lengths.tolist()
    bad = {
        row: f"expected {length} rewards, one a token of tokens.full, or a single one; got {list(reward.shape)}"
        for row, (reward, length) in enumerate(zip(given, lengths, strict=True))
        if reward.numel() not in (1, length) or reward.ndim > 2
    }
    refuse(bad, str(key))
    parts = Ragged(penalty, layout.lengths).split()
    return [
        _less(reward, (part if reward.numel() == len(part) else part.sum()).to(reward.device))
        for reward, part in zip(given, parts, strict=True)
    ]


def _less(reward: Tensor, penalty: Tensor) -> Tensor:
    """A new tensor; rewards that are no floats become float32."""
    dtype = reward.dtype if reward.dtype.is_floating_point else penalty.dtype
    finer = torch.promote_types(dtype, penalty.dtype)
    return (reward.to(finer) - penalty.reshape(reward.shape)).to(dtype)
