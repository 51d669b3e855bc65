"""What a TensorDict holds, without making its lazily created rows: for `to_records`, `repad` and everything printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
    lazy_stack,
)
from torch import Tensor

from corelm.containers.assemble import non_tensors
from corelm.containers.classes import (
    ChatHistory,
    LogProbs,
    Masks,
    PerToken,
    Text,
    Tokens,
    as_provenance,
    ragged,
    row_lengths,
)
from corelm.containers.field_access import rows
from corelm.containers.history import History
from corelm.errors import InvalidRequestError, refuse
from corelm.spec.provenance import Provenance
from corelm.tensors.lazy_rows import FlatObjects, FlatRows, flat_source, lazy_rows
from corelm.tensors.ragged import Ragged

T = TypeVar("T")
Path = tuple[str, ...]

PER_TOKEN = (Tokens, Masks, LogProbs, PerToken)
CONTAINERS = (*PER_TOKEN, Text, ChatHistory, History)


def entries(td: TensorDictBase, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every entry of `td` with its path. Nested TensorDicts are entered; containers are not.

    Tensors of different shapes, which only a lazy stack of rows can hold, are yielded as one list in C order.
    """
    for name in td.keys():
        value = entry(td, name)
        here = (*path, name)
        if isinstance(value, CONTAINERS) or is_non_tensor(value) or isinstance(value, (Tensor, list)):
            yield here, value
        elif isinstance(value, TensorDictBase):
            yield from entries(value, here)
        elif is_tensorclass(value):
            yield from entries(value._tensordict, here)
        else:
            yield here, value


def entries_per_token(td: TensorDictBase) -> Iterator[tuple[Path, Any]]:
    """Yield every entry as `entries` does, but a dense `argmax` as a `PerToken`, which it is in rows."""
    for path, value in entries(td):
        yield path, _argmax(td, path, value) if path[-1] == "argmax" else value


def _argmax(td: TensorDictBase, path: Path, value: Any) -> Any:
    """Return integers that are laid out like the masks as a `PerToken`, and anything else unchanged."""
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(one, Tensor) and is_integer(one) for one in parts):
        return value
    masks = td.get(masks_of(td, path), None)
    if not isinstance(masks, Masks) or "all_attention_mask" not in masks.keys() or masks.batch_size != td.batch_size:
        return value
    if isinstance(value, Tensor):
        attention = dense_field(masks, "all_attention_mask")
        fits = isinstance(attention, Tensor) and attention.shape == value.shape
        return PerToken(full=value, batch_size=td.batch_size) if fits else value
    alike = all(one.shape == row.all_attention_mask.shape for one, row in zip(value, rows(masks), strict=True))
    return per_token_of_rows(value, masks, tuple(td.batch_size)) if alike else value


def dense_field(container: Any, name: str) -> Any:
    """Return a field of a dense container; None if it is not dense, or its rows do not form one tensor."""
    try:
        return getattr(container, name) if container.padded else None
    except InvalidRequestError:
        return None


def is_integer(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def per_token_of_rows(values: list[Tensor], beside: Any, shape: tuple[int, ...]) -> PerToken:
    """Return one value per token in each row, as a `PerToken` in the layout that each row of `beside` has."""
    level: list[Any] = [
        PerToken(full=one, padded=row.padded, batch_size=[]) for one, row in zip(values, rows(beside), strict=True)
    ]
    for width in reversed(shape):
        level = [lazy_stack(level[at : at + width]) for at in range(0, len(level), width)]
    return level[0]


def numbers_of(td: TensorDictBase, path: Path, numbers: PerToken) -> Ragged:
    """Return the rows of a `PerToken` that `entries_per_token` yielded."""
    key, masks = (*path, "full"), masks_of(td, path)
    if isinstance(entry(td.get(path[:-1]) if path[:-1] else td, path[-1]), PerToken):
        return ragged(td, key, masks=masks)
    held = TensorDict({}, batch_size=td.batch_size)
    held.set(path, numbers)
    held.set(masks, td.get(masks))
    return ragged(held, key, masks=masks)


def entry(td: TensorDictBase, name: str) -> Any:
    """Return one entry; rows whose tensors do not form one tensor as a list, in C order."""
    try:
        return td.get(name)
    except RuntimeError:
        if not isinstance(td, LazyStackedTensorDict):
            raise
        return [row.get(name) for row in rows(td)]


def must_have_batch(td: TensorDictBase, path: Path, container: Any) -> None:
    """Refuse a container with another batch size than the TensorDict that holds it."""
    if tuple(container.batch_size) != tuple(td.batch_size):
        name = ".".join(path)
        raise InvalidRequestError(
            f"{name} has batch {tuple(container.batch_size)}, but the TensorDict has {tuple(td.batch_size)}; "
            f"set td.batch_size = {list(container.batch_size)} first",
            field=name,
        )


def masks_of(td: TensorDictBase, path: Path) -> Path:
    """Return the path of the `Masks` that belong to the container at `path`: next to it, else at the root."""
    for parent in dict.fromkeys((path[:-1], ())):
        holder = td.get(parent) if parent else td
        found = [name for name in holder.keys() if isinstance(entry(holder, name), Masks)]
        if found:
            return (*parent, "masks" if "masks" in found else found[0])
    return (*path[:-1], "masks")


def row_data(container: Any, name: str) -> list[Any]:
    """Return the value of a non-tensor field for every row, in C order; None for rows without it."""
    td = container._tensordict
    count = math.prod(td.batch_size)
    source = flat_source(td)
    if isinstance(source, FlatRows):
        found = list(source.objects(name))
        return found if len(found) == count else found * count
    if name in td.keys():
        return objects(td.get(name), len(td.batch_size))
    return [None if value is None else value.data for value in (row.get(name, None) for row in rows(td))]


def objects(value: Any, dims: int) -> list[Any]:
    """Return the Python objects of a non-tensor entry, one a row of a batch with `dims` dimensions, in C order."""
    if isinstance(value, NonTensorData):
        return [value.data] * math.prod(value.batch_size[:dims])
    found = [value.tolist()]
    for _ in range(dims):
        found = [leaf for part in found for leaf in part]
    return found


def provenances(log_probs: LogProbs) -> list[Provenance | None]:
    """Return the provenance of every row, in C order; None where it is not known."""
    data = row_data(log_probs, "provenance")
    # Rows made together share their datum, so each datum is read once.
    read = {id(datum): as_provenance(datum) for datum in data if datum}
    return [read[id(datum)] if datum else None for datum in data]


# Tokens and what belongs to them -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumns:
    """The tokens of a TensorDict and everything in it that has one value a token, without pads.

    Attributes:
        ids: one row a sample, in C order: the prompt followed by the response.
        prompt_lengths: int64[rows]; None if rows are not split.
        assistant: bool, as long as `ids`; None if that is not known.
        log_probs: by key, the values and whether each is scored; both as long as `ids`.
        numbers: by key, the values of each `PerToken`; as long as `ids`.
    """

    ids: Ragged
    prompt_lengths: Tensor | None
    assistant: Ragged | None = None
    log_probs: dict[str, tuple[Ragged, Ragged]] = field(default_factory=dict)
    numbers: dict[str, Ragged] = field(default_factory=dict)

    @classmethod
    def of(cls, td: TensorDictBase) -> TokenColumns | None:
        """Read the `Tokens` of `td`, and the containers next to them. None if `td` has no `Tokens`.

        Raises:
            InvalidRequestError: rows of a container have other lengths than the tokens, or dense tokens have no masks.
        """
        path = tokens_path(td)
        if path is None:
            return None
        ids, prompt_lengths = token_ids(td, path)
        made = cls(ids=ids, prompt_lengths=prompt_lengths)
        assistant = None
        for other, value in entries_per_token(td):
            if other[:-1] != path[:-1]:
                continue
            name = ".".join(other)
            if isinstance(value, Masks) and "all_assistant_mask" in value.keys():
                assistant = made.aligned(td, (*other, "all_assistant_mask"))
            elif isinstance(value, PerToken):
                made.numbers[name] = numbers_of(td, other, value).to("cpu")
                same_lengths(made.numbers[name], ids.lengths, (*other, "full"))
            elif isinstance(value, LogProbs):
                values = made.aligned(td, (*other, "full" if "full" in value.keys() else "response"))
                made.log_probs[name] = values, made.scored(td, other, values)
        return cls(
            ids=ids,
            prompt_lengths=prompt_lengths,
            assistant=assistant,
            log_probs=made.log_probs,
            numbers=made.numbers,
        )

    def aligned(self, td: TensorDictBase, key: Path) -> Ragged:
        """Return a field as rows as long as `ids`; a response alone is filled up with zeros in front."""
        values = ragged(td, key, masks=masks_of(td, key[:-1])).to("cpu")
        if key[-1] == "response" and self.prompt_lengths is not None:
            front = Ragged.full(self.prompt_lengths, 0, values.values.dtype)
            values = front.join(values)
        same_lengths(values, self.ids.lengths, key)
        return values

    def scored(self, td: TensorDictBase, path: Path, values: Ragged) -> Ragged:
        """Return which of the log-probs at `path` mean something. Without a `scored_mask`, all of them do."""
        container = td.get(path)
        if "scored_mask" in container.keys():
            return self.aligned(td, (*path, "scored_mask"))
        if "full" in container.keys() or self.prompt_lengths is None:
            return values.with_values(torch.ones_like(values.values, dtype=torch.bool))
        return values.with_values(self.in_response())

    def in_response(self) -> Tensor:
        """bool, like the values of `ids`: True after the prompt."""
        assert self.prompt_lengths is not None
        return self.ids.positions >= self.prompt_lengths[self.ids.row_index]


def tokens_path(td: TensorDictBase) -> Path | None:
    """Return the path of the `Tokens` of `td`: "tokens", else the first. None if there are none."""
    found = [path for path, value in entries(td) if isinstance(value, Tokens)]
    return ("tokens",) if ("tokens",) in found else next(iter(found), None)


def token_lengths(td: TensorDictBase, path: Path) -> tuple[Tensor, Tensor | None]:
    """Return the lengths of the rows of the `Tokens` at `path`, and of their prompts if the rows are split. int64."""
    parts = _parts(td, path, row_lengths)
    if "prompt" in parts and ("response" in parts or "full" in parts):
        both = parts["full"] if "full" in parts else parts["prompt"] + parts["response"]
        return both, parts["prompt"]
    if "response" in parts and "full" in parts:
        return parts["full"], parts["full"] - parts["response"]
    return next(iter(parts.values())), None


def token_ids(td: TensorDictBase, path: Path) -> tuple[Ragged, Tensor | None]:
    """Return the ids of the `Tokens` at `path`, on the CPU, and the lengths of the prompts if the rows are split."""
    parts = {name: rows.to("cpu") for name, rows in _parts(td, path, ragged).items()}
    if "prompt" in parts and ("response" in parts or "full" in parts):
        ids = parts["full"] if "full" in parts else parts["prompt"].join(parts["response"])
        return ids, parts["prompt"].lengths
    if "response" in parts and "full" in parts:
        return parts["full"], parts["full"].lengths - parts["response"].lengths
    return next(iter(parts.values())), None


def _parts(td: TensorDictBase, path: Path, read: Callable[..., T]) -> dict[str, T]:
    """Read the fields of the `Tokens` at `path`."""
    fields, masks = td.get(path).keys(), masks_of(td, path)
    parts = {name: read(td, (*path, name), masks=masks) for name in ("prompt", "response", "full") if name in fields}
    if not parts:
        raise InvalidRequestError(f"{'.'.join(path)} holds no ids", field=".".join(path))
    return parts


def same_lengths(values: Ragged, lengths: Tensor, key: Path) -> None:
    """Refuse rows that do not have the lengths of the tokens."""
    name = ".".join(key)
    if len(values) != len(lengths):
        raise InvalidRequestError(f"{name}: has {len(values)} rows, but the tokens have {len(lengths)}", field=name)
    differs = (values.lengths != lengths).nonzero().flatten().tolist()
    refuse({row: f"{values.lengths[row]} values for {lengths[row]} tokens" for row in differs}, name)


# The first rows ------------------------------------------------------------------------------------------------------


def head(td: TensorDictBase, count: int) -> Any:
    """Return the first `count` rows, in C order, under one batch dimension. Makes no other lazily created row.

    Entries that cannot be read are left out. Values are not copied.
    """
    source = flat_source(td)
    total = math.prod(td.batch_size)
    count = min(count, total)
    if isinstance(source, FlatRows):
        fields = {
            name: value.first(count) if isinstance(value, Ragged) else value[:count]
            for name, value in source.fields.items()
        }
        return lazy_rows(fields, (count,)) if count else TensorDict({}, batch_size=[0])
    if isinstance(td, LazyStackedTensorDict):
        found = list(islice(each_row(td), count))
        return type(td)(*found, stack_dim=0) if found else TensorDict({}, batch_size=[0])
    out = TensorDict({}, batch_size=[count])
    for name in td.keys():
        try:
            out.set(name, _head_of(td.get(name), len(td.batch_size), count))
        except Exception:  # what is printed must not fail because of one entry
            continue
    return out


def each_row(td: Any) -> Iterator[Any]:
    """Yield the rows of a lazy stack one by one."""
    if not td.batch_dims:
        yield td
        return
    for index in range(td.shape[0]):
        yield from each_row(td[index])


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
