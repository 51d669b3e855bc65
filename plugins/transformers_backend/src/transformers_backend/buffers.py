"""`Buffers`: keys and values of a layer in buffers of fixed shapes, into which a step writes a column in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer


class Buffers(StaticLayer):
    """The `keys` and `values` of a layer, ``[rows, heads, room, size]``.

    `StaticLayer` has a column of its own in each layer, which costs three small operations a layer and step. These
    share one, so `get_seq_length` says what it said before the step until the step ends. A model to which that matters
    fails the trial.

    Args:
        keys, values: those so far.
        room: the number of columns.
        column: int64[], the number of columns that are written before a step. The owner of the layers counts.
    """

    def __init__(self, keys: Tensor, values: Tensor, room: int, column: Tensor) -> None:
        super().__init__(room)
        self.device, self.is_initialized, self.cumulative_length = keys.device, True, column
        left = (0, 0, 0, room - keys.shape[-2])
        self.keys, self.values = torch.nn.functional.pad(keys, left), torch.nn.functional.pad(values, left)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states of one new token a row, and return the whole buffers."""
        assert self.keys is not None and self.values is not None
        column = self.cumulative_length.to(self.device)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            # In autocast, a cache holds values in the dtype of the keys, which may be wider than those of a step.
            assert torch.promote_types(states.dtype, buffer.dtype) == buffer.dtype, (states.dtype, buffer.dtype)
            buffer.index_copy_(2, column, states.to(buffer.dtype))
        return self.keys, self.values
