"""Read what a TensorDict holds: containers in either layout, without making their lazily created rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
    lazy_stack,
)
from torch import Tensor

from corelm.containers.assemble import container, dense_columns
from corelm.containers.classes import (
    COUNTS,
    SETS,
    TOP,
    WIDE,
    LogProbs,
    Masks,
    PerToken,
    Text,
    Tokens,
    as_provenance,
    must_have_lengths,
    of_one_width,
    ragged_rows,
    row_objects,
    rows,
)
from corelm.containers.history import ChatHistory, History
from corelm.errors import InvalidRequestError, MissingKeyError, Problems, refuse
from corelm.spec.provenance import Provenance
from corelm.spec.records import Columns, Parts
from corelm.tensors.lazy_rows import flat_source
from corelm.tensors.ragged import Ragged, as_mask, is_integer
from corelm.tensors.token_sets import TokenSets
from corelm.validate import invalid, nearest

Path = tuple[str, ...]

PER_TOKEN = (Tokens, Masks, LogProbs, PerToken)
CONTAINERS = (*PER_TOKEN, Text, ChatHistory, History)


# Keys -----------------------------------------------------------------------------------------------------------------


def key_parts(key: NestedKey) -> tuple[str, ...]:
    """Return the key as a tuple: ``"tokens"`` and ``("tokens",)`` are the same key."""
    return key if isinstance(key, tuple) else (key,)


def container_of(key: NestedKey) -> NestedKey:
    """Return the key of a container, given that, or the key of its field `full`: ``("log_probs", "full")``."""
    parts = key_parts(key)
    parts = parts[:-1] if parts[1:] and parts[-1] == "full" else parts
    return parts[0] if len(parts) == 1 else parts


def list_keys(td: TensorDictBase, missing: NestedKey) -> str:
    """Return what to append to a message about a missing key: the key that is spelt much like it, or all keys.

    ``" (did you mean 'rewards'?)"``, or ``"; it has: log_probs, reward"``.
    """
    wanted, keys = key_parts(missing), sorted(map(key_parts, td.keys(include_nested=True)))
    others = {".".join(key): key for key in keys if key != wanted}
    if near := nearest(".".join(wanted), others):
        key = others[near]
        return f" (did you mean {key if key[1:] else near!r}?)"
    # Fields of other containers would fill a screen.
    names = [".".join(key) for key in keys if len(key) == 1 or key[0] in (wanted[0], "next")]
    return f"; it has: {', '.join(names) or 'nothing'}"


def next_or_root(td: TensorDictBase) -> TensorDictBase:
    """Return ``td["next"]`` if it exists, else `td`: the TensorDict that holds rewards and receives results."""
    return td.get("next") if "next" in td.keys() else td


def find_entry(td: TensorDictBase, key: NestedKey, first: TensorDictBase | None = None) -> tuple[Any, TensorDictBase]:
    """Return an entry and the TensorDict that holds it.

    `first` is searched first, if given, then ``next``, then the root: a policy writes its log-probs before
    the step, an environment writes its rewards after it.
    """
    for holder in (first, next_or_root(td), td):
        if holder is not None and key in holder.keys(include_nested=True):
            return holder.get(key), holder
    shown = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    raise MissingKeyError(f"the TensorDict has no {shown!r}{list_keys(td, key)}", field=str(shown))


# One field -----------------------------------------------------------------------------------------------------------


def ragged(td: TensorDictBase, key: NestedKey, *, masks: NestedKey = "masks") -> Ragged:
    """Return the rows of a `Tokens`, `Masks`, `LogProbs` or `PerToken` field without pads, in C order.

    Works for both layouts and every batch shape.

    Args:
        td: holds the container; may be a single row, with batch shape ().
        key: container and field, such as ``("tokens", "response")``.
        masks: the key of the `Masks` that tell tokens from pads in a dense field. Other layouts need no masks.

    Raises:
        InvalidRequestError: the container or field does not exist, or `td` has no masks for a dense field; or
            rows have different numbers of the most probable ids.
    """
    *path, name = (key,) if isinstance(key, str) else key
    container = td.get(tuple(path), None) if path else None
    if not isinstance(container, PER_TOKEN) or name not in container.keys():
        raise InvalidRequestError(
            f"{key!r} is not a field of a Tokens, Masks, LogProbs or PerToken container in this TensorDict"
            f"{list_keys(td, key)}",
            field=str(key),
        )
    try:
        if (unmade := flat_source(container._tensordict)) or not container.padded:
            found = ragged_rows(container, name)
            # The caller may modify it.
            return found.clone() if unmade else found
        values, attention = getattr(container, name), getattr(td.get(masks, None), "all_attention_mask", None)
    except InvalidRequestError:  # a stack of both layouts, or dense rows of different widths
        # `td` may have fewer batch dimensions than the container, or none.
        held = TensorDict({tuple(path): container}, batch_size=container.batch_size)
        if (mask := td.get(masks, None)) is not None:
            held.set(masks, mask)
        parts = [ragged(row, key, masks=masks) for row in rows(held)]
        values = of_one_width([part.values for part in parts], key)
        return Ragged.cat([part.with_values(one) for part, one in zip(parts, values, strict=True)])
    mask = values >= 0 if name == SETS else _attention_columns(values, attention, name, masks)
    return Ragged(values[mask], mask.sum(-1).flatten())


def _attention_columns(values: Tensor, attention: Any, name: str, masks: NestedKey) -> Tensor:
    """Return the columns of the attention mask that belong to a dense field: prompts come first, responses last."""
    shape = values.shape[:-1] if name in WIDE else values.shape
    width = shape[-1]
    if isinstance(attention, Tensor):
        start = attention.shape[-1] - width if name == "response" else 0
        stop = width if name == "prompt" else attention.shape[-1]
        mask = attention[..., max(start, 0) : stop]
        if mask.shape == shape:
            return as_mask(mask, str(masks)).to(values.device)
    found = f"a mask of shape {tuple(attention.shape)}" if isinstance(attention, Tensor) else "no dense mask"
    needs = f"the dense field {name!r} of shape {tuple(values.shape)} needs the attention mask of its rows to tell"
    raise InvalidRequestError(f"{needs} tokens from pads, but {masks!r} holds {found}", field=str(masks))


def token_sets(td: TensorDictBase, key: NestedKey = "log_probs", *, masks: NestedKey = "masks") -> TokenSets:
    """Return the ids over which the log-probs of each token were normalised, as long as the tokens.

    An empty set stands for the whole vocabulary, and for a token that was not scored. Works for both layouts
    and every batch shape; the rows are in C order.

    Args:
        td: holds the `LogProbs`; may be a single row, with batch shape ().
        key: the key of the `LogProbs`.
        masks: the key of the `Masks` that tell tokens from pads in dense rows. Other layouts need no masks.

    Raises:
        MissingKeyError: there is no `LogProbs` under the key, or it has no such ids.
        InvalidRequestError: dense rows have no masks, or the ids of a row are not as many as its counts say;
            `rows` lists these rows.
    """
    path = key_parts(container_of(key))
    name = ".".join(path)
    held = td.get(path, None)
    if not isinstance(held, LogProbs):
        raise MissingKeyError(f"{name}: the TensorDict has no LogProbs there{list_keys(td, key)}", field=name)
    if not carries_sets(held):
        raise MissingKeyError(
            f"{name}.{SETS}: these log-probs do not say over which ids they were normalised; sample with "
            "LLMPolicy(…, return_support=True)",
            field=f"{name}.{SETS}",
        )
    counts, ids = (ragged(td, (*path, field), masks=masks) for field in (COUNTS, SETS))
    numbers, totals = counts.values.cpu(), counts.sums()
    problems = {
        row: f"the counts add up to {int(totals[row])}, but {SETS} holds {int(ids.lengths[row])} ids"
        for row in (totals != ids.lengths).nonzero().flatten().tolist()
    }
    for at in (numbers < 0).nonzero().flatten().tolist():
        problems[int(counts.row_index[at])] = f"position {int(counts.positions[at])}: the count is {int(numbers[at])}"
    refuse(problems, f"{name}.{COUNTS}")
    return TokenSets.from_flat(ids, counts)


def about_ids(td: TensorDictBase, path: Path, masks: NestedKey) -> dict[str, Ragged | TokenSets]:
    """Return what the log-probs at `path` say about ids, by field and as long as the tokens."""
    held = td.get(path)
    found: dict[str, Any] = {SETS: token_sets(td, path, masks=masks)} if carries_sets(held) else {}
    names = [name for name in ("kept_log_mass", *TOP) if name in held.keys()]
    return found | {name: ragged(td, (*path, name), masks=masks) for name in names}


def carries_sets(log_probs: LogProbs) -> bool:
    """Return whether these log-probs say over which ids they were normalised."""
    return {SETS, COUNTS} <= set(log_probs.keys())


def provenance_of_rows(log_probs: LogProbs, count: int) -> tuple[Provenance | None, ...]:
    """Return the provenance of each row, in C order; None for a row without one. `count` is the number of rows."""
    data = row_objects(log_probs._tensordict, "provenance")
    # Rows made together share their datum, so each datum is read once.
    read = {id(datum): as_provenance(datum) for datum in data if datum}
    return tuple(read.get(id(datum)) for datum in data) if read else (None,) * count


# All entries ---------------------------------------------------------------------------------------------------------


def entries(td: TensorDictBase, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every entry of `td` with its path. Nested TensorDicts are entered; containers are not.

    Tensors of different shapes, which only a lazy stack of rows can hold, are yielded as one list in C order.
    """
    for name in td.keys():
        value = entry(td, name)
        if isinstance(value, CONTAINERS) or is_non_tensor(value):
            yield (*path, name), value
        elif isinstance(value, TensorDictBase) or is_tensorclass(value):
            yield from entries(value if isinstance(value, TensorDictBase) else value._tensordict, (*path, name))
        else:
            yield (*path, name), value


def scan(td: TensorDictBase) -> tuple[dict[Path, Any], TensorDict]:
    """Return every entry by its path, as `entries` does, and a TensorDict of the containers with a value per token.

    A dense `argmax` that is laid out like the masks is a `PerToken` in both, which it is in rows.
    """
    found, held = dict(entries(td)), TensorDict({}, batch_size=td.batch_size)
    for path, value in found.items():
        if isinstance(value, PER_TOKEN):
            must_have_batch(td, path, value)
            held.set(path, value)
    for path, value in found.items():
        masks = held.get(masks_of(held, path), None) if path[-1] == "argmax" else None
        rows_of_ids = value if isinstance(value, list) else [value]
        if not isinstance(masks, Masks) or not all(isinstance(one, Tensor) and is_integer(one) for one in rows_of_ids):
            continue
        per_row = isinstance(value, list) or dense_mask(masks) is not None
        if per_row and (made := as_per_token(value, masks)) is not None:
            found[path] = made
            held.set(path, made)
    return found, held


def as_per_token(value: Tensor | list[Tensor], like: Any) -> PerToken | None:
    """Return a tensor, or one a row, as a `PerToken` laid out like the container `like`.

    None if a tensor is not shaped like dense `Masks`, or a row is no list of numbers.
    """
    shape, mask = tuple(like.batch_size), dense_mask(like)
    if isinstance(value, Tensor) and mask is not None:
        return PerToken(full=value, batch_size=shape) if value.shape == mask.shape else None
    count = like.batch_size.numel()
    values = value if isinstance(value, list) else list(value.reshape(count, *value.shape[len(shape) :]))
    if any(one.ndim != 1 for one in values):
        return None
    level: list[Any] = [
        PerToken(full=one, padded=row.padded, batch_size=[]) for one, row in zip(values, rows(like), strict=True)
    ]
    for width in reversed(shape):
        level = [lazy_stack(level[at : at + width]) for at in range(0, len(level), width)]
    return level[0]


def dense_mask(masks: Any) -> Tensor | None:
    """Return the attention mask of dense `Masks`, ``[*batch, width]``. None if there is not one, or not one tensor."""
    with suppress(InvalidRequestError):
        return masks.all_attention_mask if isinstance(masks, Masks) and masks.padded else None
    return None


def is_dense(container: Any) -> bool:
    """Return whether all rows are dense. Those of different widths are read row by row."""
    with suppress(InvalidRequestError):
        return container.padded is True
    return False


def entry(td: TensorDictBase, name: NestedKey) -> Any:
    """Return one entry; rows whose tensors do not form one tensor as a list, in C order."""
    try:
        return td.get(name)
    except RuntimeError:
        if not isinstance(td, LazyStackedTensorDict):
            raise
        return [row.get(name) for row in rows(td)]


def must_have_batch(td: TensorDictBase, path: Path, container: Any) -> None:
    """Refuse a container with another batch size than the TensorDict that holds it."""
    found, wanted = tuple(container.batch_size), tuple(td.batch_size)
    if found != wanted:
        what = f"has batch {found}, but the TensorDict has {wanted}; set td.batch_size = {list(found)} first"
        raise invalid(".".join(path), what)


def masks_of(td: TensorDictBase, path: Path) -> Path:
    """Return the path of the `Masks` that belong to the container at `path`: next to it, else at the root."""
    for parent in dict.fromkeys((path[:-1], ())):
        holder = td.get(parent, None) if parent else td
        found = [] if holder is None else [name for name in holder.keys() if isinstance(entry(holder, name), Masks)]
        if found:
            return (*parent, "masks" if "masks" in found else found[0])
    return (*path[:-1], "masks")


# Tokens and what belongs to them -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The tokens that containers have values of: how long rows are, and where they are in dense tensors.

    Values are read as flat rows without pads, in C order, and stored like the tokens.

    Attributes:
        td: holds the containers. It may have fewer batch dimensions than these.
        paths: where they are. Of a field that several have, that of the first one counts.
        masks: the key of the `Masks` that tell tokens from pads in dense tensors.
    """

    td: TensorDictBase
    paths: Sequence[Path]
    masks: NestedKey

    @classmethod
    def of(cls, td: TensorDictBase) -> TokenRows | None:
        """Return the `Tokens` of `td` and the containers next to them. None if `td` has no `Tokens`."""
        found, held = scan(td)
        tokens = [path for path, value in found.items() if isinstance(value, Tokens)]
        if not tokens:
            return None
        path = ("tokens",) if ("tokens",) in tokens else tokens[0]
        others = [other for other, value in found.items() if other[:-1] == path[:-1] and isinstance(value, PER_TOKEN)]
        return cls(held, [*dict.fromkeys([path, *others])], masks_of(held, path))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.td.get(self.paths[0]).batch_size)

    def paths_of(self, kind: type) -> list[Path]:
        return [path for path in self.paths if isinstance(self.td.get(path), kind)]

    @cached_property
    def mask(self) -> Tensor | None:
        """bool[rows, width]: where tokens are in dense tensors. None for rows, and for several widths."""
        mask = dense_mask(self.td.get(self.masks, None)) if is_dense(self.td.get(self.paths[0])) else None
        if mask is None or tuple(mask.shape[:-1]) != self.shape:
            return None
        return as_mask(mask, str(self.masks)).reshape(math.prod(self.shape), mask.shape[-1])

    @cached_property
    def lengths(self) -> Tensor:
        """int64[rows], on the CPU: the number of tokens in each row."""
        if self.mask is not None:
            return self.mask.sum(-1).cpu()
        for whole in (("full",), ("all_attention_mask",), ("scored_mask",), ("prompt", "response")):
            if parts := [part.lengths for name in whole if (part := self._field(name)) is not None]:
                return torch.stack(parts).sum(0)
        raise invalid(".".join(self.paths[0]), "it has no field that says how long its rows are")

    @cached_property
    def prompt_lengths(self) -> Tensor | None:
        """int64[rows]; None if rows are not split."""
        if (prompt := self._field("prompt")) is not None:
            return prompt.lengths
        if (response := self._field("response")) is not None:
            return self.lengths - response.lengths
        marks = self._field("all_response_mask")
        return None if marks is None else self.lengths - marks.sums()

    @cached_property
    def everywhere(self) -> Ragged:
        """bool: True at every token."""
        return Ragged.full(self.lengths, True, torch.bool)

    @property
    def in_response(self) -> Tensor:
        """bool[total]: True after the prompt."""
        assert self.prompt_lengths is not None
        return self.everywhere.positions >= self.prompt_lengths[self.everywhere.row_index]

    @cached_property
    def narrowest(self) -> Columns:
        """Where ``pad_output=True`` puts the tokens."""
        full, start = self.everywhere, self.prompt_lengths
        prompt, response = (None, None) if start is None else (full.slice(stop=start), full.slice(start))
        return dense_columns(Parts(prompt, response, full))

    @property
    def columns(self) -> Columns:
        """Where the tokens are in dense tensors, or would be with ``pad_output=True``."""
        return self.narrowest if self.mask is None else Columns(self.mask, None)

    # Reading ---------------------------------------------------------------------------------------------------------

    def _field(self, name: str) -> Ragged | None:
        path = next((path for path in self.paths if name in self.td.get(path).keys()), None)
        return None if path is None else ragged(self.td, (*path, name), masks=self.masks)

    def ids(self) -> tuple[Ragged, Tensor | None]:
        """Return the ids of the `Tokens`, which come first, on the CPU, and `prompt_lengths` if they are split."""
        ids, start = token_ids(self.td, self.paths[0], self.masks)
        must_have_lengths(ids.lengths, self.lengths, ".".join(self.paths[0]))
        return ids, start

    def read(self, key: NestedKey) -> Ragged:
        """Return a field of a container as rows as long as the tokens; a response has zeros in front."""
        *path, name = key_parts(key)
        if self.mask is not None and name not in ("prompt", "response"):
            return self.ragged(self.flat(getattr(self.td.get(tuple(path)), name), key))
        values = ragged(self.td, key, masks=self.masks)
        if name == "response" and self.prompt_lengths is not None:
            before = Ragged.full(self.prompt_lengths, 0, values.values.dtype)
            values = before.to(values.values.device).join(values)
        must_have_lengths(values.lengths, self.lengths, str(key))
        return values

    def flat(self, dense: Any, key: NestedKey) -> Tensor:
        """Return the tokens of a dense tensor ``[*batch, width]``, for `WIDE` fields ``[*batch, width, k]``, flat."""
        mask, wide = self.columns.mask, key_parts(key)[-1] in WIDE
        wanted = (*self.shape, mask.shape[-1])
        shape = tuple(dense.shape) if isinstance(dense, Tensor) else None
        if shape is None or (shape[:-1] if wide else shape) != wanted:
            expected = f"shape {[*wanted, 'k'] if wide else [*wanted]}, as wide as the masks"
            found = "no dense tensor" if shape is None else list(shape)
            raise InvalidRequestError(f"{key}: expected {expected}; got {found}", field=str(key))
        return dense.reshape(*mask.shape, *shape[len(wanted) :])[mask.to(dense.device)]

    def log_probs(self, path: Path) -> tuple[Ragged, Ragged]:
        """Return the values of a `LogProbs`, and which mean something: all without a `scored_mask`."""
        names = self.td.get(path).keys()
        alone = "full" not in names and "response" in names
        values = self.read((*path, "response" if alone else "full"))
        if "scored_mask" in names:
            key = (*path, "scored_mask")
            return values, self.ragged(as_mask(self.read(key).values, str(key)))
        return values, self.ragged(self.in_response) if alone else self.everywhere

    def assistant(self) -> Ragged | None:
        """Return which tokens are the assistant's; None if that is not known."""
        found = [path for path in self.paths_of(Masks) if "all_assistant_mask" in self.td.get(path).keys()]
        return self.read((*found[-1], "all_assistant_mask")) if found else None

    # Computing and storing -------------------------------------------------------------------------------------------

    def ragged(self, values: Tensor) -> Ragged:
        return Ragged(values, self.lengths)

    def row_sums(self, values: Tensor) -> Tensor:
        """Return ``[*batch]``: the sum of each row of flat values."""
        index = self.everywhere.row_index.to(values.device)
        return values.new_zeros(len(self.lengths)).index_add(0, index, values).reshape(self.shape)

    def first(self, mask: Tensor) -> Tensor:
        """Return int64[rows]: where `mask`, bool[total], is first True; the length of a row if nowhere."""
        at, rows = mask.cpu(), self.everywhere
        return self.lengths.scatter_reduce(0, rows.row_index[at], rows.positions[at], "amin")

    def not_finite(self, values: Tensor, mask: Tensor, name: Any) -> Problems:
        """Return, for each row with a NaN or an infinity where `mask` is True, the first of these `name`."""
        values = values.detach()
        first, starts = self.first(mask & ~torch.isfinite(values)), self.everywhere.offsets
        return {
            row: f"{name} is {float(values[starts[row] + first[row]])} at position {int(first[row])}"
            for row in (first < self.lengths).nonzero().flatten().tolist()
        }

    def dense(self, values: Tensor) -> Tensor:
        """Return flat values as ``[*batch, width]``, with 0 at pads."""
        mask = self.columns.mask
        return self.ragged(values).scatter(mask, 0).reshape(*self.shape, mask.shape[-1])

    def stored(self, values: Tensor) -> Tensor | PerToken:
        """Return flat values in the layout of the tokens: a dense tensor, or a `PerToken` of rows."""
        dense = self.mask is not None
        made = container(PerToken, {"full": self.ragged(values)}, self.shape, columns=self.columns if dense else None)
        return made.full if dense else made


def token_ids(td: TensorDictBase, path: Path, masks: NestedKey) -> tuple[Ragged, Tensor | None]:
    """Return the ids of the `Tokens` at `path`, on the CPU, and the lengths of the prompts if the rows are split."""
    names = [name for name in ("prompt", "response", "full") if name in td.get(path).keys()]
    parts = {name: ragged(td, (*path, name), masks=masks).to("cpu") for name in names}
    prompt, response, full = (parts.get(name) for name in ("prompt", "response", "full"))
    if len(parts) == 1:
        return next(iter(parts.values())), None
    if prompt is not None and response is not None:
        return prompt.join(response) if full is None else full, prompt.lengths
    if full is None:
        raise InvalidRequestError(f"{'.'.join(path)} holds no ids", field=".".join(path))
    return full, full.lengths - parts["response"].lengths if prompt is None else prompt.lengths
