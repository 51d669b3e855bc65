"""Per-token values out of a TensorDict and back: flat while they are computed with, in their own layout outside.

Dense rows give and take tensors ``[*batch, width]``. Rows of their own length give flat values; what is made of them
goes into a `PerToken`, since a TensorDict holds no bare tensors of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from corelm.containers.classes import PerToken
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm.tensors.ragged import Ragged


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """How the tokens of a batch are stored.

    Attributes:
        batch: the shape of the batch; its rows are counted in C order.
        lengths: int64[rows], tokens in each.
        padded: whether they are stored in one dense tensor.
        find_columns: makes `columns`.
    """

    batch: tuple[int, ...]
    lengths: Tensor
    padded: bool
    find_columns: Callable[[], Tensor]

    @cached_property
    def columns(self) -> Tensor:
        """bool[rows, width]: where tokens are in a dense tensor, or would be with ``pad_output=True``."""
        return self.find_columns()

    def ragged(self, values: Tensor) -> Ragged:
        return Ragged(values, self.lengths)

    def row_sums(self, values: Tensor) -> Tensor:
        """``[*batch]``: the sum of each row of flat values."""
        index = self.ragged(values).row_index.to(values.device)
        return values.new_zeros(len(self.lengths)).index_add(0, index, values).reshape(self.batch)

    def dense(self, values: Tensor) -> Tensor:
        """``[*batch, width]``, 0 at pads."""
        return self.ragged(values).scatter(self.columns, 0).reshape(*self.batch, self.columns.shape[-1])

    def flat(self, dense: Any, key: NestedKey) -> Tensor:
        """The tokens of a dense tensor ``[*batch, width]``, one after another."""
        wanted = (*self.batch, self.columns.shape[-1])
        if not isinstance(dense, Tensor) or tuple(dense.shape) != wanted:
            found = list(dense.shape) if isinstance(dense, Tensor) else "none that is dense"
            raise InvalidRequestError(
                f"{key}: expected {list(wanted)}, as wide as the masks; got {found}", field=str(key)
            )
        return dense.reshape(self.columns.shape)[self.columns.to(dense.device)]

    def stored(self, values: Tensor) -> Tensor | PerToken:
        """As the tokens are: a tensor, or a `PerToken` of rows."""
        return self.dense(values) if self.padded else per_token(values, self.lengths, self.batch)


def per_token(values: Tensor, lengths: Tensor, batch: tuple[int, ...]) -> PerToken:
    """Flat values as a lazy stack of rows, each of which owns its storage."""
    if 0 in batch:
        return PerToken.from_tensordict(TensorDict({"full": values.reshape(*batch, 0)}, batch_size=batch))
    level: Sequence[Any] = [
        TensorDict({"full": row}, batch_size=())
        for row in torch.split_with_sizes_copy(values, lengths.tolist())  # type: ignore[func-returns-value,attr-defined]
    ]
    for width in reversed(batch):
        level = [LazyStackedTensorDict(*level[at : at + width]) for at in range(0, len(level), width)]
    return PerToken.from_tensordict(level[0])


# Where things are ----------------------------------------------------------------------------------------------------


def place(td: TensorDictBase) -> TensorDictBase:
    """Where results go and rewards are: ``next`` if there is one, else the TensorDict itself."""
    return td.get("next") if "next" in td.keys() else td


def find(td: TensorDictBase, key: NestedKey, first: TensorDictBase | None = None) -> tuple[Any, TensorDictBase]:
    """An entry and where it was: in `first` if given, in `next`, or in the TensorDict itself, in that order.

    A policy writes its log-probs before the step, an environment its rewards after it.

    Raises:
        MissingKeyError: it is in none of them.
    """
    for here in [*([] if first is None else [first]), place(td), td]:
        if key in here.keys(include_nested=True):
            return here.get(key), here
    raise MissingKeyError(f"there is no {key!r}; there are: {listing(td)}", field=str(key))


def listing(td: TensorDictBase) -> str:
    names = (key if isinstance(key, tuple) else (key,) for key in td.keys(include_nested=True))
    return ", ".join(sorted(".".join(name) for name in names)) or "none"


def parts(key: NestedKey) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)
