"""Values of a user's TensorDict: how they are found, which shape they have, and which kind they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from corelm.backend.arguments import refuse_pads, rows_of_ids
from corelm.containers.classes import Masks, Tokens
from corelm.containers.fields import flat, rows
from corelm.containers.reading import ragged
from corelm.errors import InvalidRequestError, Problems, refuse
from corelm.tensors.masks import as_mask, not_a_mask
from corelm.tensors.ragged import Ragged, as_tensor
from corelm.validate import as_list, read_once, shown


def find_value(td: TensorDictBase, key: NestedKey) -> Any:
    """Return the value at the key, or None. Bare rows of different lengths, stacked lazily, come back as a list."""
    if key not in td.keys(include_nested=True):
        return None
    try:
        return td[key]
    except RuntimeError:
        return td.get(key, as_list=True)


def unmasked(ids: Ragged, mask: Any, field: str) -> Ragged:
    """Return the ids on the CPU, without those that a mask of the same rows hides."""
    ids = ids.to("cpu")
    if mask is None:
        return ids
    masks = _mask_rows(mask, field)
    shows = Ragged.from_list([row.cpu() for row in masks], torch.bool)
    lengths = zip(ids.lengths.tolist(), shows.lengths.tolist(), strict=False)
    problems = {row: f"{n} tokens, but a mask of {m}" for row, (n, m) in enumerate(lengths) if n != m}
    if len(shows) != len(ids):
        problems = {len(shows): "no mask"} if len(shows) < len(ids) else {len(ids): "a mask, but no tokens"}
    refuse(problems, field)
    counts = torch.zeros_like(ids.lengths).index_add_(0, ids.row_index, shows.values.long())
    return Ragged(ids.values[shows.values], counts)


def _mask_rows(mask: Any, field: str) -> list[Tensor]:
    """Return one tensor a row; refuse the rows that are no masks."""
    if isinstance(mask, Tensor) and (mask.is_nested or mask.ndim):
        mask = list(mask.unbind())
    if not isinstance(mask := as_list(mask), list):
        raise InvalidRequestError(f"{field}: expected one mask for each row, got {shown(mask)}", field=field)
    found, problems = [], {}
    for row, given in enumerate(mask):
        try:
            found.append(as_tensor(given))
            why = not_a_mask(found[-1]) or ("" if found[-1].ndim == 1 else f"a mask of shape {tuple(found[-1].shape)}")
        except Exception:  # texts, None, lists of unequal length; the object's own methods may raise anything
            why = shown(given)
        if why:
            problems[row] = f"expected a mask of True and False, or 1 and 0; got {why}"
    refuse(problems, field)
    return found


def masks_in_rows(given: Mapping[str, Any], tokens: Tokens) -> Masks:
    """Return masks that come as one tensor per row, in lists nested like the batch of `tokens`."""
    shape = tuple(tokens.batch_size)
    by_name = {}
    for name, mask in given.items():
        try:
            by_name[name] = _mask_rows(_at_depth(mask, len(shape)), f"masks.{name}")
        except TypeError:  # fewer dimensions than the batch
            by_name[name] = []
        if (found := len(by_name[name])) != math.prod(shape):
            raise InvalidRequestError(
                f"masks.{name}: expected one mask for each of {math.prod(shape)} rows, got {found}", field="masks"
            )
    stack: list[Any] = [
        Masks(**{name: found[row] for name, found in by_name.items()}, padded=tokens.padded)
        for row in range(math.prod(shape))
    ]
    for size in reversed(shape):
        stack = [lazy_stack(stack[start : start + size]) for start in range(0, len(stack), size)]
    stacked: Masks = stack[0]
    return stacked


def _at_depth(value: Any, depth: int) -> list[Any]:
    return [leaf for part in value for leaf in _at_depth(part, depth - 1)] if depth else [value]


def hides_tokens(masks: Masks, field: str) -> bool:
    """Return whether the attention mask, which errors call `field`, is False somewhere."""
    if "all_attention_mask" not in masks.keys():
        return False
    own = TensorDict({"masks": masks}, batch_size=masks.batch_size)
    try:
        shown = masks.all_attention_mask if masks.padded else ragged(own, ("masks", "all_attention_mask")).values
    except InvalidRequestError:  # dense rows of different widths, or a stack of both layouts
        shown = [row.all_attention_mask for row in rows(masks)]
    if isinstance(shown, Tensor) and shown.is_nested:
        shown = list(shown.unbind())
    return not all(bool(as_mask(row, field).all()) for row in flat(shown))


#: What to do about pads without a mask; follows "…, pads would be read as tokens; ".
PADS_ADVICE = (
    "put the tokenizer's attention_mask into the TensorDict, next to the ids or under a key that you pass as "
    "attention_mask_key; or pass rows without pads: Tokens.from_rows(prompt=[[…], […]]). If these ids are tokens, pass "
    "a mask of ones: torch.ones_like(ids)"
)


def find_input_ids(
    td: TensorDictBase, top: tuple[str, ...], value: Any, part: str
) -> tuple[TensorDictBase, tuple[str, ...]] | None:
    """Return where the `input_ids` of a tokenizer's batch are: a TensorDict and the key in it; None if there are none.

    The batch is the value under the key `top` that is read, or, if there is no such key, `td` itself.
    """
    if isinstance(value, TensorDictBase) and not isinstance(value, Tokens):
        return (td, (*top, "input_ids")) if part not in value.keys() and "input_ids" in value.keys() else None
    if isinstance(value, Mapping) and "input_ids" in value:
        # tensordict holds a BatchEncoding as one object.
        batch = {name: value[name] for name in ("input_ids", "attention_mask") if name in value}
        return TensorDict(batch), ("input_ids",)
    return (td, ("input_ids",)) if value is None and "input_ids" in td.keys() else None


def ids_of_tensor(value: Tensor, mask: Any, key: str, mask_name: str) -> tuple[Ragged, Tensor]:
    """Return the ids of ``[*batch, width]`` where the mask is True, and the mask as bool[rows, width], on the CPU.

    Raises:
        InvalidRequestError: the mask has another shape, or the values are no ids.
    """
    if not isinstance(mask, Tensor) or mask.shape != value.shape:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else "rows of unequal length"
        raise InvalidRequestError(
            f"{key}: tokens are {tuple(value.shape)}, but their attention mask is {found}", field=key
        )
    columns = two_dimensional(as_mask(mask, mask_name)).cpu()
    return rows_of_ids(Ragged.from_padded(two_dimensional(value).cpu(), columns), key), columns


def dense_rows(values: Tensor) -> Ragged:
    """Return the rows of ``[*batch, width]``, each with all of its columns, on the CPU."""
    dense = two_dimensional(values).cpu()
    return Ragged(dense.reshape(-1), torch.full((dense.shape[0],), dense.shape[1], dtype=torch.int64))


def refuse_pads_of(tokens: Tokens, top: tuple[str, ...], tokenizer: Any, eos_ids: Collection[int]) -> None:
    """Refuse dense `Tokens` under the key `top` that have no mask and of which a row begins or ends with pads."""

    def columns(part: Any, name: str) -> Ragged:
        try:
            return dense_rows(getattr(part, name))
        except InvalidRequestError:  # rows of different widths
            return Ragged.cat([columns(row, name) for row in part.unbind(0)])

    for name in ("prompt", "response", "full"):
        if name in tokens.keys():
            refuse_pads(columns(tokens, name), tokenizer, eos_ids, ".".join((*top, name)), PADS_ADVICE)


def masks_without_pads(tokens: Tokens, part: str) -> Any:
    """Return `Masks` that take every id of dense tokens for a token."""
    try:
        widest = tokens.full if "full" in tokens.keys() else getattr(tokens, part)
    except InvalidRequestError:  # rows of different widths
        return lazy_stack([masks_without_pads(row, part) for row in tokens.unbind(0)])
    return Masks(all_attention_mask=torch.ones_like(widest, dtype=torch.bool), batch_size=tokens.batch_size)


def differing_rows(there: Ragged, ours: Ragged) -> Problems:
    """Return how rows of ids differ; an empty dict if they are equal. Both are on the CPU, with as many rows."""
    if torch.equal(there.lengths, ours.lengths) and torch.equal(there.values, ours.values):
        return {}
    problems: Problems = {}
    for row, (one, other) in enumerate(zip(there.tolist(), ours.tolist(), strict=True)):
        if one != other:
            same = min(len(one), len(other))
            at = next((t for t in range(same) if one[t] != other[t]), same)
            problems[row] = f"{len(one)} tokens are there, {len(other)} were read; they differ from position {at} on"
    return problems


def differing_splits(there: Tensor | None, ours: Tensor | None) -> Problems:
    """Return where prompts end at other tokens; an empty dict if ours are not split. int64[rows] each."""
    if ours is None:
        return {}
    if there is None:
        return {0: "the tokens that are there are not split into prompt and response"}
    pairs = enumerate(zip(there.tolist(), ours.tolist(), strict=True))
    return {row: f"the prompt has {one} tokens there, {other} were read" for row, (one, other) in pairs if one != other}


def nested_field(container: Tokens, part: str) -> Tensor | None:
    """Return a field if it is a nested tensor, else None."""
    try:
        value = getattr(container, part) if container.padded else None
    except InvalidRequestError:  # rows that are padded to different widths
        return None
    return value if isinstance(value, Tensor) and value.is_nested else None


def kind_of(value: Any) -> str:
    """Return the name of the value's type, and how to convert an iterator or a container of TorchRL."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != "torchrl":
        return f"{kind.__name__}{read_once(value)}"
    return (
        f"{kind.__name__} of {kind.__module__}; convert it with corelm_interop.torchrl.from_torchrl, "
        "or give the policy to corelm_interop.torchrl.EnvPolicy"
    )


def unnested(tokens: Tokens) -> Tokens:
    """Return tokens of which a field is a nested tensor as rows of their own length; others as they are."""
    names = [name for name in ("prompt", "response", "full") if name in tokens.keys()]
    if all(nested_field(tokens, name) is None for name in names):
        return tokens
    return Tokens.from_rows(**{name: list(rows_of_ids(getattr(tokens, name), name).split()) for name in names})


def two_dimensional(tensor: Tensor) -> Tensor:
    """Reshape ``[*batch, width]`` to ``[rows, width]``, even if there are no rows."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def batch_of(td: TensorDictBase, found: tuple[int, ...], key: tuple[str, ...]) -> tuple[int, ...]:
    """Return the batch size: the TensorDict's, or the data's if the TensorDict has none."""
    batch = tuple(td.batch_size)
    if batch and batch != found:
        raise InvalidRequestError(
            f"{'.'.join(key)}: its batch is {found}, but the TensorDict's is {batch}", field=".".join(key)
        )
    return found


def leaves(value: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return the leaves of nested sequences in C order, and the shape. Sequences of unequal length are leaves."""
    value = as_list(value)
    if not isinstance(value, list):
        return [value], ()
    parts = [leaves(item) for item in value]
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        return value, (len(value),)
    return [leaf for flat, _ in parts for leaf in flat], (len(value), *(shapes.pop() if shapes else ()))
