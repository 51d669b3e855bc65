"""`TokenLayout`: how the tokens of a batch are stored, so that per-token values can be flattened and put back.

The KL modules compute on flat values: one float per token, row after row. Dense batches read and write tensors
``[*batch, width]``. Rows of different lengths are written as a `PerToken`, because a TensorDict cannot hold bare
tensors of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from corelm.containers.classes import PerToken
from corelm.errors import InvalidRequestError, Problems
from corelm.tensors.lazy_rows import lazy_rows
from corelm.tensors.ragged import Ragged


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """How the tokens of a batch are stored.

    Attributes:
        batch: the shape of the batch; its rows are counted in C order.
        lengths: int64[rows], the number of tokens in each row.
        padded: whether the tokens are stored in one dense tensor.
        find_columns: computes `columns`.
    """

    batch: tuple[int, ...]
    lengths: Tensor
    padded: bool
    find_columns: Callable[[], Tensor]

    @cached_property
    def columns(self) -> Tensor:
        """bool[rows, width]: where tokens are in the dense tensor, or would be with ``pad_output=True``."""
        return self.find_columns()

    def ragged(self, values: Tensor) -> Ragged:
        return Ragged(values, self.lengths)

    def row_sums(self, values: Tensor) -> Tensor:
        """Return ``[*batch]``: the sum of each row of flat values."""
        index = self.ragged(values).row_index.to(values.device)
        return values.new_zeros(len(self.lengths)).index_add(0, index, values).reshape(self.batch)

    def dense(self, values: Tensor) -> Tensor:
        """Return flat values as ``[*batch, width]``, with 0 at pads."""
        return self.ragged(values).scatter(self.columns, 0).reshape(*self.batch, self.columns.shape[-1])

    def flat(self, dense: Any, key: NestedKey) -> Tensor:
        """Return the tokens of a dense tensor ``[*batch, width]`` as flat values.

        Raises:
            InvalidRequestError: `dense` is not a tensor of that shape; the message names `key`.
        """
        wanted = (*self.batch, self.columns.shape[-1])
        if not isinstance(dense, Tensor) or tuple(dense.shape) != wanted:
            found = list(dense.shape) if isinstance(dense, Tensor) else "no dense tensor"
            raise InvalidRequestError(
                f"{key}: expected shape {list(wanted)}, as wide as the masks; got {found}", field=str(key)
            )
        return dense.reshape(self.columns.shape)[self.columns.to(dense.device)]

    def not_finite(self, values: Tensor, mask: Tensor, name: Any) -> Problems:
        """Return, for each row with a NaN or an infinity where `mask` is True, the first of them.

        Args:
            values: flat values.
            mask: bool, as long as `values`.
            name: what the values are called in the messages.
        """
        values = values.detach()
        bad = (mask & ~torch.isfinite(values)).nonzero().flatten().cpu()
        where = self.ragged(values)
        first = bad[where.row_index[bad].diff(prepend=torch.tensor([-1])) > 0].tolist()
        return {
            int(where.row_index[index]): f"{name} is {float(values[index])} at position {int(where.positions[index])}"
            for index in first
        }

    def stored(self, values: Tensor) -> Tensor | PerToken:
        """Return flat values in the layout of the tokens: a dense tensor, or a `PerToken` of rows."""
        if self.padded:
            return self.dense(values)
        if 0 in self.batch:
            return PerToken.from_tensordict(TensorDict({"full": values.reshape(*self.batch, 0)}, batch_size=self.batch))
        return PerToken.from_tensordict(lazy_rows({"full": self.ragged(values)}, self.batch))
