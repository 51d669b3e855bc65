"""Token ids in a user's TensorDict, and the masks that tell them from pads. A pad is never guessed.

Ids come bare or in a container, dense or in rows of unequal length. Dense ids without a mask are taken to have no pads,
and refused if a row begins or ends with the tokenizer's pad id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from corelm.backend.arguments import refuse_pads, refuse_unreadable, rows_of_ids
from corelm.backend.backend import Backend
from corelm.containers.classes import Masks, Tokens, ragged
from corelm.containers.field_access import flat, rows
from corelm.containers.keys import list_keys
from corelm.errors import InvalidRequestError, MissingKeyError, refuse
from corelm.policy.rows import InputRows, find_value
from corelm.spec.records import Columns
from corelm.tensors.masks import as_mask, not_a_mask
from corelm.tensors.ragged import Ragged, as_tensor
from corelm.validate import as_list, invalid, shown

Key = tuple[str, ...]

#: What to do about pads without a mask; follows "…, pads would be read as tokens; ".
_PADS_ADVICE = (
    "put the tokenizer's attention_mask into the TensorDict, next to the ids or under a key that you pass as "
    "attention_mask_key; or pass rows without pads: Tokens.from_rows(prompt=[[…], […]]). If these ids are tokens, pass "
    "a mask of ones: torch.ones_like(ids)"
)
REPEAT = "give each response a prompt, in a batch of the same shape: repeat the prompt for every one of its responses"


@dataclass(frozen=True, slots=True)
class MaskKeys:
    """Where the masks of the ids are.

    Attributes:
        masks: the key of the `Masks`, which may be a plain TensorDict.
        given: the key of an attention mask that is read instead of theirs; None reads theirs.
    """

    masks: Key
    given: Key | None = None

    @property
    def name(self) -> str:
        """The key of the attention mask, for errors."""
        return ".".join(self.given or (*self.masks, "all_attention_mask"))

    def attention(self, td: TensorDictBase) -> Any:
        """Return the attention mask, or None.

        Raises:
            MissingKeyError: there is none under the key that was given.
        """
        mask = find_value(td, self.given or (*self.masks, "all_attention_mask"))
        if mask is None and self.given is not None:
            raise MissingKeyError(
                f"the TensorDict has no {self.name!r}, which attention_mask_key names; it has: {list_keys(td)}",
                field="attention_mask_key",
            )
        return mask

    def assistant(self, td: TensorDictBase) -> Any:
        """Return the mask of the assistant's tokens, or None."""
        return find_value(td, (*self.masks, "all_assistant_mask"))


# Bare ids ------------------------------------------------------------------------------------------------------------


def read_ids(td: TensorDictBase, value: Any, keys: MaskKeys, backend: Backend, name: str, part: str) -> InputRows:
    """Read bare ids: a tensor ``[*batch, width]``, a nested tensor, or rows in a list.

    Args:
        td: holds the masks.
        value: the ids.
        keys: where the masks are.
        backend: knows the pad id.
        name: the key of the ids, for errors.
        part: "prompt", or "full" for sequences, of which the mask of the assistant's tokens is read as well.

    Raises:
        InvalidRequestError: these are no ids, their mask does not fit, or they have pads and no mask.
    """
    mask = keys.attention(td)
    if not isinstance(value, Tensor) or value.is_nested:
        ids = rows_of_ids(value, name).to("cpu")
        return InputRows(batch_size=(len(ids),), ids=ids if mask is None else _without_pads(ids, mask, name))
    refuse_unreadable(value, name)
    if value.ndim == 0:
        raise invalid(name, "expected token ids along the last dimension, got a single number")
    if mask is None:
        refuse_pads(_dense_rows(value), backend.tokenizer, backend.eos_token_ids, name, _PADS_ADVICE)
        mask = torch.ones_like(value, dtype=torch.bool)
    elif not isinstance(mask, Tensor) or mask.shape != value.shape:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else "rows of unequal length"
        raise invalid(name, f"tokens are {tuple(value.shape)}, but their attention mask is {found}")
    columns = _matrix(as_mask(mask, keys.name)).cpu()
    ids = rows_of_ids(Ragged.from_padded(_matrix(value).cpu(), columns), name)
    assistant = keys.assistant(td) if part == "full" else None
    said = None
    if isinstance(assistant, Tensor) and assistant.shape == value.shape:
        said = ids.with_values(_matrix(as_mask(assistant, "masks.all_assistant_mask")).cpu()[columns])
    return InputRows(batch_size=tuple(value.shape[:-1]), ids=ids, columns=Columns(columns, None), assistant=said)


def find_input_ids(td: TensorDictBase, top: Key, value: Any, part: str) -> tuple[TensorDictBase, Key] | None:
    """Return where the `input_ids` of a tokenizer's batch are: a TensorDict and the key in it; None if there are none.

    The batch is the value under the key `top` that is read, or, if there is no such key, `td` itself.
    """
    if isinstance(value, TensorDictBase) and not isinstance(value, Tokens):
        return (td, (*top, "input_ids")) if part not in value.keys() and "input_ids" in value.keys() else None
    if isinstance(value, Mapping) and "input_ids" in value:
        # tensordict holds a BatchEncoding as one object.
        return TensorDict({name: value[name] for name in ("input_ids", "attention_mask") if name in value}), (
            "input_ids",
        )
    return (td, ("input_ids",)) if value is None and "input_ids" in td.keys() else None


def _without_pads(ids: Ragged, mask: Any, name: str) -> Ragged:
    """Return the ids without those that a mask of the same rows hides."""
    shows = Ragged.from_list([row.cpu() for row in _mask_rows(mask, name)], torch.bool)
    lengths = zip(ids.lengths.tolist(), shows.lengths.tolist(), strict=False)
    problems = {row: f"{n} tokens, but a mask of {m}" for row, (n, m) in enumerate(lengths) if n != m}
    if len(shows) != len(ids):
        problems = {len(shows): "no mask"} if len(shows) < len(ids) else {len(ids): "a mask, but no tokens"}
    refuse(problems, name)
    counts = torch.zeros_like(ids.lengths).index_add_(0, ids.row_index, shows.values.long())
    return Ragged(ids.values[shows.values], counts)


def _mask_rows(mask: Any, name: str) -> list[Tensor]:
    """Return one tensor a row; refuse the rows that are no masks."""
    if isinstance(mask, Tensor) and (mask.is_nested or mask.ndim):
        mask = list(mask.unbind())
    if not isinstance(mask := as_list(mask), list):
        raise invalid(name, f"expected one mask for each row, got {shown(mask)}")
    found, problems = [], {}
    for row, given in enumerate(mask):
        try:
            found.append(as_tensor(given))
            why = not_a_mask(found[-1]) or ("" if found[-1].ndim == 1 else f"a mask of shape {tuple(found[-1].shape)}")
        except (TypeError, ValueError, RuntimeError):  # texts, None, lists of unequal length
            why = shown(given)
        if why:
            problems[row] = f"expected a mask of True and False, or 1 and 0; got {why}"
    refuse(problems, name)
    return found


def _dense_rows(values: Tensor) -> Ragged:
    dense = _matrix(values).cpu()
    return Ragged(dense.reshape(-1), torch.full((dense.shape[0],), dense.shape[1], dtype=torch.int64))


def _matrix(tensor: Tensor) -> Tensor:
    """Reshape ``[*batch, width]`` to ``[rows, width]``, even if there are no rows."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


# Containers of ids ---------------------------------------------------------------------------------------------------


def read_container(
    td: TensorDictBase, tokens: Tokens, keys: MaskKeys, part: str, key: Key = (), backend: Backend | None = None
) -> InputRows:
    """Read `Tokens`. The sequences keep their split and, if dense, their columns.

    Args:
        td: holds the masks.
        tokens: the container.
        keys: where the masks are.
        part: the field to read.
        key: the key of the container, for errors.
        backend: refuses dense tokens without a mask that begin or end with its pad id; None looks for no pads.

    Raises:
        InvalidRequestError: the masks do not fit, or there are pads and no mask.
    """
    tokens = _unnested(tokens)
    masks = _masks_of(td, tokens, keys)
    if masks is None and tokens.padded:
        if backend is not None:
            _refuse_pads_of(tokens, key, backend)
        masks = _masks_without_pads(tokens, part)
    # Errors name the mask by its key.
    held = {"tokens": tokens, **({} if masks is None else {keys.name: masks})}
    given = TensorDict(held, batch_size=tokens.batch_size)

    def read(container: str, name: str) -> Ragged:
        return ragged(given, (container, name), masks=keys.name).to("cpu")

    found = InputRows(batch_size=tuple(tokens.batch_size), ids=read("tokens", part))
    if part == "prompt":
        return found
    split = "prompt" in tokens.keys()
    columns = assistant = None
    if tokens.padded and masks is not None:
        # Rows that are padded to different widths have no common columns.
        with suppress(InvalidRequestError):
            mask = _matrix(as_mask(masks.all_attention_mask, keys.name)).cpu()
            columns = Columns(mask, tokens.prompt.shape[-1] if split else None)
    if masks is not None and "all_assistant_mask" in masks.keys():
        # Scoring cannot find out which tokens are the assistant's, so it keeps what the input says.
        assistant = read(keys.name, "all_assistant_mask")
        assistant = assistant.with_values(as_mask(assistant.values, "masks.all_assistant_mask"))
    lengths = read("tokens", "prompt").lengths if split else None
    return replace(found, prompt_lengths=lengths, columns=columns, assistant=assistant)


def nested_field(container: Tokens, part: str) -> Tensor | None:
    """Return a field if it is a nested tensor, else None."""
    try:
        value = getattr(container, part) if container.padded else None
    except InvalidRequestError:  # rows that are padded to different widths
        return None
    return value if isinstance(value, Tensor) and value.is_nested else None


def are_completions(held: Any) -> bool:
    """Return whether a container, or a plain TensorDict, holds prompts and responses, and no whole sequences."""
    fields = held.keys()
    return "prompt" in fields and "response" in fields and "full" not in fields


def with_full(tokens: Any, key: str) -> Tokens:
    """Return `Tokens` of prompts and responses with their `full`, in the layout that they have.

    Args:
        tokens: `Tokens`, or a plain TensorDict with a ``prompt`` and a ``response``.
        key: the key that holds them, for errors.

    Raises:
        InvalidRequestError: their shapes do not fit.
    """
    if isinstance(tokens, TensorDictBase):
        given = {name: as_list(find_value(tokens, name)) for name in ("prompt", "response")}
        if any(isinstance(ids, list) for ids in given.values()):
            # tensordict makes a tensor of rows that happen to be equally long.
            return Tokens.from_rows(**{name: list(ids) for name, ids in given.items()})
        ids = given["prompt"]
        shape = tokens.batch_size if not isinstance(ids, Tensor) or ids.is_nested else ids.shape[:-1]
        tokens = Tokens(**given, batch_size=shape)
    try:
        prompt, response = tokens.prompt, tokens.response
    except InvalidRequestError:  # dense rows of different widths
        return lazy_stack([with_full(row, key) for row in tokens.unbind(0)])
    if not tokens.padded:
        return Tokens.from_rows(prompt=prompt, response=response)
    if prompt.is_nested or response.is_nested:
        nested = {"prompt": rows_of_ids(prompt, f"{key}.prompt"), "response": rows_of_ids(response, f"{key}.response")}
        return Tokens.from_rows(**{name: list(ids.split()) for name, ids in nested.items()})
    if prompt.ndim == 0 or prompt.shape[:-1] != response.shape[:-1]:
        shapes = f"prompts are {list(prompt.shape)}, responses {list(response.shape)}"
        raise invalid(f"{key}.response", f"{shapes}; {REPEAT}")
    return Tokens(
        prompt=prompt, response=response, full=torch.cat([prompt, response], -1), batch_size=tokens.batch_size
    )


def _unnested(tokens: Tokens) -> Tokens:
    """Return tokens of which a field is a nested tensor as rows of their own length; others as they are."""
    names = [name for name in ("prompt", "response", "full") if name in tokens.keys()]
    if all(nested_field(tokens, name) is None for name in names):
        return tokens
    return Tokens.from_rows(**{name: list(rows_of_ids(getattr(tokens, name), name).split()) for name in names})


def _refuse_pads_of(tokens: Tokens, key: Key, backend: Backend) -> None:
    """Refuse dense `Tokens` that have no mask and of which a row begins or ends with pads."""

    def columns(part: Any, name: str) -> Ragged:
        try:
            return _dense_rows(getattr(part, name))
        except InvalidRequestError:  # rows of different widths
            return Ragged.cat([columns(row, name) for row in part.unbind(0)])

    for name in ("prompt", "response", "full"):
        if name in tokens.keys():
            ids, field = columns(tokens, name), ".".join((*key, name))
            refuse_pads(ids, backend.tokenizer, backend.eos_token_ids, field, _PADS_ADVICE)


def _masks_without_pads(tokens: Tokens, part: str) -> Any:
    """Return `Masks` that take every id of dense tokens for a token."""
    try:
        widest = tokens.full if "full" in tokens.keys() else getattr(tokens, part)
    except InvalidRequestError:  # rows of different widths
        return lazy_stack([_masks_without_pads(row, part) for row in tokens.unbind(0)])
    return Masks(all_attention_mask=torch.ones_like(widest, dtype=torch.bool), batch_size=tokens.batch_size)


def _masks_of(td: TensorDictBase, tokens: Tokens, keys: MaskKeys) -> Masks | None:
    """Return the masks of a container of ids."""
    found = find_value(td, keys.masks)
    if isinstance(found, Masks) and keys.given is None:
        if not tokens.padded and "all_attention_mask" in found.keys() and _hides_tokens(found, keys.name):
            raise _no_pads(keys.name)
        return found
    given = {"all_attention_mask": keys.attention(td)}
    if isinstance(found, (TensorDictBase, Masks)) and (keys.given is None or "all_attention_mask" not in found.keys()):
        given["all_assistant_mask"] = keys.assistant(td)
    given = {name: mask for name, mask in given.items() if mask is not None}
    if not given:
        return None
    if not tokens.padded and "all_attention_mask" in given:
        raise _no_pads(keys.name)
    if tokens.padded and all(isinstance(mask, Tensor) and not mask.is_nested for mask in given.values()):
        return Masks(**given, batch_size=tokens.batch_size)
    return None if 0 in tokens.batch_size else _masks_in_rows(given, tokens)


def _masks_in_rows(given: Mapping[str, Any], tokens: Tokens) -> Masks:
    """Return masks that come as one tensor per row, in lists nested like the batch of `tokens`."""
    shape = tuple(tokens.batch_size)
    count, by_name = math.prod(shape), {}
    for name, mask in given.items():
        try:
            by_name[name] = _mask_rows(_at_depth(mask, len(shape)), f"masks.{name}")
        except TypeError:  # fewer dimensions than the batch
            by_name[name] = []
        if (found := len(by_name[name])) != count:
            raise InvalidRequestError(
                f"masks.{name}: expected one mask for each of {count} rows, got {found}", field="masks"
            )
    stack: list[Any] = [
        Masks(**{name: found[row] for name, found in by_name.items()}, padded=tokens.padded) for row in range(count)
    ]
    for size in reversed(shape):
        stack = [lazy_stack(stack[start : start + size]) for start in range(0, len(stack), size)]
    masks: Masks = stack[0]
    return masks


def _at_depth(value: Any, depth: int) -> list[Any]:
    return [leaf for part in value for leaf in _at_depth(part, depth - 1)] if depth else [value]


def _hides_tokens(masks: Masks, name: str) -> bool:
    """Return whether the attention mask is False somewhere."""
    own = TensorDict({"masks": masks}, batch_size=masks.batch_size)
    try:
        shown = masks.all_attention_mask if masks.padded else ragged(own, ("masks", "all_attention_mask")).values
    except InvalidRequestError:  # dense rows of different widths, or a stack of both layouts
        shown = [row.all_attention_mask for row in rows(masks)]
    if isinstance(shown, Tensor) and shown.is_nested:
        shown = list(shown.unbind())
    return not all(bool(as_mask(row, name).all()) for row in flat(shown))


def _no_pads(mask: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{mask}: tokens in rows of unequal length (padded=False) have no pads; leave their attention mask out, or, if "
        "the rows do hold pads, make the Tokens with padded=True",
        field="masks",
    )


# Which attention mask belongs to the ids -----------------------------------------------------------------------------


def mask_next_to(td: TensorDictBase, top: Key, held: Any, part: str, *, has_masks: bool) -> Key | None:
    """Return the key of the `attention_mask` that belongs to the ids under the key `top`; None if there is none.

    It is in the plain TensorDict that holds the ids, or next to `top`. Its name may begin as that of the ids does:
    ``chosen_attention_mask`` for ``chosen_input_ids``. A mask of another shape belongs to the `input_ids` next to it if
    it has theirs, and it may be that of the prompts whose answers a container without pads or with responses holds.

    Args:
        td: holds the ids.
        top: the key of the ids, or of the container that holds them.
        held: the value under that key.
        part: the field of the container that is read.
        has_masks: whether there is an attention mask in the `Masks`, which is read if this one has another shape.

    Raises:
        InvalidRequestError: the mask has another shape, or would hide tokens of rows that should have no pads, or of
            an answer, to which it need not belong.
    """
    plain = isinstance(held, TensorDictBase)
    container = plain or isinstance(held, Tokens)
    *path, own = top
    stem = own.removesuffix("input_ids") if own.endswith("input_ids") else own.removesuffix("ids")
    keys = [(*top, "attention_mask")] if plain else []
    keys += [(*path, f"{stem}attention_mask")] if stem not in (own, "") else []
    misfit = None
    for key in (*keys, (*path, "attention_mask")):
        if (mask := find_value(td, key)) is None:
            continue
        widths = _widths_of(held, part)
        fits = widths is not None and _widths(mask) == widths
        answered = container and {"response", "full"} <= set(held.keys())
        if answered or (not plain and container and not held.padded):
            if fits and _hides(mask):
                raise _unclear(".".join(key)) if answered else _no_pads(".".join(key))
        elif fits:
            return key
        elif key[-1] != "attention_mask" or not _is_of_input_ids(td, key, mask, top):
            misfit = misfit or key
    if misfit is None or has_masks:
        return None
    if container:
        raise InvalidRequestError(
            f"{'.'.join(misfit)}: its rows are not as wide as those of the tokens under {'.'.join(top)!r}; give the "
            "mask of prompt and response together if both are read, or delete it",
            field="masks",
        )
    return misfit


def _is_of_input_ids(td: TensorDictBase, key: Key, mask: Any, top: Key) -> bool:
    """Return whether a mask belongs to `input_ids` next to it, where the policy reads something else."""
    other = (*key[:-1], "input_ids")
    ids = None if other == top else find_value(td, other)
    return ids is not None and _widths(ids) == _widths(mask)


def _widths_of(held: Any, part: str) -> list[int] | None:
    """Return the widths of the rows of ids, or of the widest field of a container of ids."""
    if not isinstance(held, (Tokens, TensorDictBase)):
        return _widths(held)
    names = held.keys()
    if "full" in names:
        return _widths(_field(held, "full"))
    first = _widths(_field(held, "prompt")) if "prompt" in names else None
    if part == "prompt" or first is None or "response" not in names:
        return first
    second = _widths(_field(held, "response"))
    return None if second is None else [one + other for one, other in zip(first, second, strict=False)]


def _field(held: Any, name: str) -> Any:
    if isinstance(held, TensorDictBase):
        return find_value(held, name)
    try:
        return getattr(held, name)
    except InvalidRequestError:  # dense rows of different widths
        return [_field(row, name) for row in held.unbind(0)]


def _widths(value: Any) -> list[int] | None:
    """Return the length of each row of a dense or nested tensor, or of nested lists of rows; None for anything else."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return [len(row) for row in value.unbind()]
        return [value.shape[-1]] * math.prod(value.shape[:-1]) if value.ndim else None
    value = as_list(value)
    if not isinstance(value, list):
        return None
    parts = [as_list(each) for each in value]
    if not any(isinstance(each, (list, Tensor)) for each in parts):
        return [len(parts)]
    found = [_widths(each) for each in parts]
    return None if None in found else [width for each in found for width in each or ()]


def _hides(mask: Any) -> bool:
    parts = mask.unbind() if isinstance(mask, Tensor) and mask.is_nested else flat(as_list(mask))
    return not all(bool(row.all()) if isinstance(row, Tensor) else bool(row) for row in parts)


def _unclear(mask: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{mask}: it has the shape of the answers that the TensorDict holds, but may be that of their prompts; give "
        f"the policy attention_mask_key={mask!r} to apply it, or delete it",
        field="masks",
    )
