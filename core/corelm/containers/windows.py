"""A few positions of every row. Printing reads these, so its cost does not grow with the length of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from corelm.containers.classes import Masks
from corelm.containers.field_access import rows
from corelm.containers.field_shapes import SETS
from corelm.containers.reading import PER_TOKEN, entries
from corelm.errors import InvalidRequestError
from corelm.tensors.lazy_rows import FlatRows, flat_source, lazy_rows
from corelm.tensors.ragged import Ragged


def row_tensors(container: Any) -> list[dict[str, Tensor]]:
    """Return the tensors of every row of a container, in C order. They are views, and no row is made."""
    source = flat_source(container._tensordict)
    if isinstance(source, FlatRows):
        split = {name: field.split() for name, field in source.fields.items() if isinstance(field, Ragged)}
        return [dict(zip(split, row, strict=True)) for row in zip(*split.values(), strict=True)]
    found = [{name: row.get(name) for name in row.keys()} for row in rows(container._tensordict)]
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
        if isinstance(value, PER_TOKEN):
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
