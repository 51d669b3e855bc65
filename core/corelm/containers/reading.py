"""Read what a TensorDict holds: containers in either layout, without making their lazily created rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from corelm.errors import InvalidRequestError, MissingKeyError, refuse
from corelm.spec.provenance import Provenance
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
    *path, name = key_parts(key)
    if not path or name != "full":
        return key
    return tuple(path) if path[1:] else path[0]


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

    Raises:
        MissingKeyError: none of them has the key.
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
        value = _entry(td, name)
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


def _entry(td: TensorDictBase, name: str) -> Any:
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
        found = [] if holder is None else [name for name in holder.keys() if isinstance(_entry(holder, name), Masks)]
        if found:
            return (*parent, "masks" if "masks" in found else found[0])
    return (*path[:-1], "masks")


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
        """Read the `Tokens` of `td`, and the containers next to them. None if `td` has no `Tokens`."""
        found, held = scan(td)
        paths = [path for path, value in found.items() if isinstance(value, Tokens)]
        if not paths:
            return None
        path = ("tokens",) if ("tokens",) in paths else paths[0]
        ids, prompt_lengths = token_ids(held, path)
        made, assistant = cls(ids=ids, prompt_lengths=prompt_lengths), None
        for other, value in found.items():
            if other[:-1] != path[:-1]:
                continue
            name = ".".join(other)
            if isinstance(value, Masks) and "all_assistant_mask" in value.keys():
                assistant = made._aligned(held, (*other, "all_assistant_mask"))
            elif isinstance(value, PerToken):
                made.numbers[name] = made._aligned(held, (*other, "full"))
            elif isinstance(value, LogProbs):
                values = made._aligned(held, (*other, "full" if "full" in value.keys() else "response"))
                made.log_probs[name] = values, made._scored(held, other, values)
        return replace(made, assistant=assistant)

    def in_response(self) -> Tensor:
        """bool, like the values of `ids`: True after the prompt."""
        assert self.prompt_lengths is not None
        return self.ids.positions >= self.prompt_lengths[self.ids.row_index]

    def _aligned(self, td: TensorDictBase, key: Path) -> Ragged:
        """Return a field as rows as long as `ids`; a response alone is filled up with zeros in front."""
        values = ragged(td, key, masks=masks_of(td, key[:-1])).to("cpu")
        if key[-1] == "response" and self.prompt_lengths is not None:
            values = Ragged.full(self.prompt_lengths, 0, values.values.dtype).join(values)
        must_have_lengths(values.lengths, self.ids.lengths, ".".join(key))
        return values

    def _scored(self, td: TensorDictBase, path: Path, values: Ragged) -> Ragged:
        """Return which of the log-probs at `path` mean something. Without a `scored_mask`, all of them do."""
        container = td.get(path)
        if "scored_mask" in container.keys():
            return self._aligned(td, (*path, "scored_mask"))
        if "full" in container.keys() or self.prompt_lengths is None:
            return values.with_values(torch.ones_like(values.values, dtype=torch.bool))
        return values.with_values(self.in_response())


def token_ids(td: TensorDictBase, path: Path) -> tuple[Ragged, Tensor | None]:
    """Return the ids of the `Tokens` at `path`, on the CPU, and the lengths of the prompts if the rows are split."""
    masks, names = masks_of(td, path), {"prompt", "response", "full"} & {*td.get(path).keys()}
    parts = {name: ragged(td, (*path, name), masks=masks).to("cpu") for name in names}
    prompt, response, full = (parts.get(name) for name in ("prompt", "response", "full"))
    if len(parts) == 1:
        return next(iter(parts.values())), None
    if prompt is not None and response is not None:
        return prompt.join(response) if full is None else full, prompt.lengths
    if full is None:
        raise InvalidRequestError(f"{'.'.join(path)} holds no ids", field=".".join(path))
    return full, full.lengths - parts["response"].lengths if prompt is None else prompt.lengths
