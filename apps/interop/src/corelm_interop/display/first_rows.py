"""The first rows of a batch, and a few positions of every row. Printing reads these, so it is fast for any batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from corelm.application import SETS, entries, non_tensors
from corelm.containers import LogProbs, Masks, PerToken, Tokens
from corelm.errors import InvalidRequestError
from corelm.tensors.lazy_rows import FlatObjects, FlatRows, flat_source, lazy_rows
from corelm.tensors.ragged import Ragged


def head(td: TensorDictBase, count: int) -> Any:
    """Return the first `count` rows, in C order, under one batch dimension. Makes no other lazily created row.

    Entries that cannot be read are left out. Values are not copied.
    """
    source = flat_source(td)
    count = min(count, math.prod(td.batch_size))
    if isinstance(source, FlatRows):
        fields = {
            name: value.first(count) if isinstance(value, Ragged) else value[:count]
            for name, value in source.fields.items()
        }
        return lazy_rows(fields, (count,)) if count else TensorDict({}, batch_size=[0])
    if isinstance(td, LazyStackedTensorDict):
        found = list(islice(_rows(td), count))
        return type(td)(*found, stack_dim=0) if found else TensorDict({}, batch_size=[0])
    out = TensorDict({}, batch_size=[count])
    for name in td.keys():
        try:
            out.set(name, _head_of(td.get(name), len(td.batch_size), count))
        except Exception:  # what is printed must not fail because of one entry
            continue
    return out


def _rows(td: Any) -> Iterator[Any]:
    """Yield the rows one by one, in C order."""
    if not td.batch_dims:
        yield td
        return
    for index in range(td.shape[0]):
        yield from _rows(td[index])


def _head_of(value: Any, dims: int, count: int) -> Any:
    if isinstance(value, Tensor):
        return value[:count] if dims == 1 else value.reshape(math.prod(value.shape[:dims]), *value.shape[dims:])[:count]
    if is_non_tensor(value):
        source = flat_source(value)
        if isinstance(source, FlatObjects):
            return non_tensors(source.values[:count], (count,))
        if isinstance(value, NonTensorData):
            return NonTensorData(value.data, batch_size=[count])
        return head(value, count)
    if isinstance(value, TensorDictBase):
        return head(value, count)
    return type(value).from_tensordict(head(value._tensordict, count))


def row_tensors(container: Any) -> list[dict[str, Tensor]]:
    """Return the tensors of every row of a container, in C order. They are views, and no row is made."""
    source = flat_source(container._tensordict)
    if isinstance(source, FlatRows):
        split = {name: field.split() for name, field in source.fields.items() if isinstance(field, Ragged)}
        return [dict(zip(split, row, strict=True)) for row in zip(*split.values(), strict=True)]
    found = [{name: row.get(name) for name in row.keys()} for row in _rows(container._tensordict)]
    return [{name: value for name, value in row.items() if isinstance(value, Tensor)} for row in found]


def window(td: TensorDictBase, lengths: Tensor, prompt_lengths: Tensor | None, shown: Sequence[range]) -> TensorDict:
    """Return the containers with one value a token, reduced to the positions ``shown[r]`` of every row r.

    Args:
        td: has one batch dimension.
        lengths: the number of tokens in each row.
        prompt_lengths: the number of tokens in each prompt; None if rows are not split.
        shown: positions in the prompt followed by the response.

    Raises:
        InvalidRequestError: rows of a container have other lengths, or have both layouts.
    """
    split = lengths if prompt_lengths is None else prompt_lengths
    start = torch.tensor([positions.start for positions in shown])
    stop = torch.tensor([positions.stop for positions in shown])
    parts = {
        "prompt": (start.minimum(split), stop.minimum(split), split),
        "response": ((start - split).clamp_min(0), (stop - split).clamp_min(0), lengths - split),
    }
    if prompt_lengths is None:  # a container may call all of its rows a prompt or a response
        parts = {}
    out = TensorDict({}, batch_size=td.batch_size)
    for path, value in entries(td):
        if isinstance(value, (Tokens, Masks, LogProbs, PerToken)):
            reduced = _of_dense(value, start, stop) if value.padded else _of_rows(value, parts, (start, stop, lengths))
            out.set(path, reduced)
    return out


def _of_dense(container: Any, start: Tensor, stop: Tensor) -> Any:
    """Take the other positions out of the attention mask, which all dense containers are read with."""
    if not isinstance(container, Masks):
        return container
    attention = container.all_attention_mask
    position = attention.cumsum(-1) - 1
    start, stop = start.to(attention.device), stop.to(attention.device)
    here = attention & (position >= start[:, None]) & (position < stop[:, None])
    return Masks.from_tensordict(container._tensordict.clone(recurse=False).set("all_attention_mask", here))


def _of_rows(
    container: Any, parts: dict[str, tuple[Tensor, Tensor, Tensor]], everything: tuple[Tensor, Tensor, Tensor]
) -> Any:
    columns = row_tensors(container)
    fields: dict[str, Any] = {}
    for name in columns[0]:
        if name == SETS:
            continue  # of another length; what is printed does not read it
        start, stop, lengths = parts.get(name, everything)
        values = [row[name] for row in columns]
        if [value.shape[0] for value in values] != lengths.tolist():
            raise InvalidRequestError(f"{name}: the rows do not have the lengths of the tokens", field=name)
        pieces = [value[a:b] for value, a, b in zip(values, start.tolist(), stop.tolist(), strict=True)]
        fields[name] = Ragged(torch.cat(pieces), stop - start)
    return type(container).from_tensordict(lazy_rows(fields, tuple(container.batch_size)))
