"""Token ids in a user's TensorDict, and the masks that tell them from pads. A pad is never guessed.

Ids come bare or in a container, dense or in rows of unequal length. Dense ids without a mask are taken to
have no pads, and refused if a row begins or ends with the tokenizer's pad id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from corelm.backend.arguments import refuse_pads, rows_of_ids
from corelm.backend.backend import Backend
from corelm.backend.more_ids import refuse_unreadable
from corelm.containers.classes import Masks, Tokens
from corelm.containers.fields import rows
from corelm.containers.reading import list_keys, ragged_rows
from corelm.errors import InvalidRequestError, MissingKeyError, refuse
from corelm.policy.rows import InputRows, find_value
from corelm.spec.records import Columns
from corelm.tensors.ragged import Ragged, as_mask, as_tensor, is_integer, not_a_mask, unreadable
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


# Ids and their pads --------------------------------------------------------------------------------------------------


def read_ids(
    td: TensorDictBase, held: Any, part: str, keys: MaskKeys, top: str, name: str, backend: Backend | None = None
) -> InputRows:
    """Read ids, without their pads. Sequences keep their split and, if dense, their columns.

    Args:
        td: holds the masks.
        held: `Tokens`, a tensor ``[*batch, width]``, a nested tensor, or rows in a list.
        part: the field of the container to read; "full" reads the mask of the assistant's tokens as well.
        keys: where the masks are.
        top: the key of the ids or of their container, for errors.
        name: the key of the field, for errors.
        backend: refuses dense ids without a mask that begin or end with its pad id; None looks for no pads.

    Raises:
        InvalidRequestError: these are no ids, their mask does not fit, or they have pads and no mask.
    """
    container = held if isinstance(held, Tokens) else None
    cells, shape, dense, in_rows = _cells(held, part, name)
    depth = 1 if container is None else len(shape)
    masks = find_value(td, keys.masks)
    at_fault = keys.name if container is not None else name
    mask = _mask(td, masks, keys, "all_attention_mask", depth, at_fault)
    if in_rows:
        # `Masks` of another length that hide nothing are those of other tokens, and replaced or refused later.
        loose = keys.given is None and isinstance(masks, Masks)
        if mask is not None and not (bool(mask.values.all()) and (loose or torch.equal(mask.lengths, cells.lengths))):
            raise _no_pads(keys.name)
        mask = None
    elif mask is None and backend is not None:
        _refuse_pads(held, cells if dense else None, top, name, backend)
    if mask is not None:
        if container is not None and part == "prompt" and len(mask) == len(cells):
            # The mask may be that of prompt and response.
            mask = mask.slice(torch.zeros_like(cells.lengths), torch.minimum(mask.lengths, cells.lengths))
        _must_be_as_long(cells, mask, at_fault)
    columns, lengths, prompt_width = None, None, None
    if container is not None and part == "full" and "prompt" in container.keys():
        prompts, _, prompts_are_dense, _ = _cells(container, "prompt", f"{top}.prompt")
        lengths = prompts.lengths
        if mask is not None:
            lengths = mask.sums(mask.values & (mask.positions < lengths[mask.row_index]))
        dense = dense and prompts_are_dense
        prompt_width = container.prompt.shape[-1] if dense else None
    if dense:
        width = held.shape[-1] if container is None else getattr(container, part).shape[-1]
        marks = torch.ones_like(cells.values, dtype=torch.bool) if mask is None else mask.values
        columns = Columns(marks.reshape(-1 if width else len(cells), width), prompt_width)
    said = None
    if part == "full":
        said = _mask(td, masks, keys, "all_assistant_mask", depth, "masks.all_assistant_mask")
    if said is not None and container is not None:
        _must_be_as_long(cells, said, "masks.all_assistant_mask")
    fits = said is not None and torch.equal(said.lengths, cells.lengths)
    return InputRows(
        batch_size=shape,
        ids=_select(cells, mask),
        prompt_lengths=lengths,
        columns=columns,
        # Scoring cannot find out which tokens are the assistant's, so it keeps what the input says.
        assistant=_select(said, mask) if said is not None and fits else None,
    )


def _cells(held: Any, part: str, name: str) -> tuple[Ragged, tuple[int, ...], bool, bool]:
    """Return ids with their pads, on the CPU; the batch size; whether they are one dense tensor; whether they are in
    `Tokens` that are not padded.
    """
    value, shape = held, None
    if isinstance(held, Tokens):
        shape = tuple(held.batch_size)
        if not held.padded:
            return rows_of_ids(ragged_rows(held, part), name).to("cpu"), shape, False, True
        try:
            value = getattr(held, part)
        except InvalidRequestError:  # rows that are padded to different widths
            value = [getattr(row, part) for row in rows(held)]
    if isinstance(value, Tensor) and not value.is_nested:
        refuse_unreadable(value, name)
        if value.ndim == 0:
            raise invalid(name, "expected token ids along the last dimension, got a single number")
        if not is_integer(value):
            raise invalid(name, f"expected one integer per token, got {value.dtype}{list(value.shape)}")
        # A copy, because the caller may write to the tensor while a request waits.
        return _dense_rows(value.to("cpu", torch.int64, copy=True)), tuple(value.shape[:-1]), True, False
    ids = rows_of_ids(value, name).to("cpu")
    return ids, (len(ids),) if shape is None or isinstance(value, Tensor) else shape, False, False


def _mask(td: TensorDictBase, found: Any, keys: MaskKeys, which: str, depth: int, name: str) -> Ragged | None:
    """Return the rows of a mask as bool, on the CPU; None if there is none.

    Args:
        td: holds the masks.
        found: the `Masks`, or what else is under their key.
        keys: where they are.
        which: the field of `Masks`.
        depth: how deep rows are in nested lists.
        name: what is at fault, for errors.
    """
    attention = which == "all_attention_mask"
    if found is None and (keys.given is None or not attention):
        return None
    value: Any
    if isinstance(found, Masks) and (keys.given is None or not attention):
        if which not in found.keys() or (keys.given is not None and "all_attention_mask" in found.keys()):
            return None
        try:
            value = getattr(found, which) if found.padded else ragged_rows(found, which)
        except InvalidRequestError:  # rows that are padded to different widths, or a stack of both layouts
            value, depth = [getattr(row, which) for row in rows(found)], 1
    else:
        value = keys.attention(td) if attention else find_value(td, (*keys.masks, which))
    if value is None:
        return None
    if isinstance(value, Ragged):
        return value.with_values(as_mask(value.values, name)).to("cpu")
    return _as_rows(value, depth, name)


def _as_rows(mask: Any, depth: int, name: str, why_not: Callable[[Any], str] = not_a_mask) -> Ragged:
    """Return the rows of a mask as bool, on the CPU; refuse those for which `why_not` returns a reason."""
    if isinstance(mask, Tensor) and mask.ndim and not mask.is_nested and not why_not(mask):
        return _dense_rows(mask.to(torch.bool))
    if isinstance(mask, Tensor) and mask.ndim:
        given = list(mask.unbind() if mask.is_nested else mask.flatten(0, -2))
    else:
        try:
            given = _at_depth(mask, depth)
        except TypeError:  # fewer dimensions than the batch
            raise invalid(name, f"expected one mask for each row, got {shown(mask)}") from None
    found, problems = [], {}
    for row, one in enumerate(given):
        try:
            tensor = as_tensor(one)
            why = why_not(tensor) or ("" if tensor.ndim == 1 else f"a mask of shape {tuple(tensor.shape)}")
        except (TypeError, ValueError, RuntimeError):  # texts, None, lists of unequal length
            why = shown(one)
        if why:
            problems[row] = f"expected a mask of True and False, or 1 and 0; got {why}"
        else:
            found.append(tensor.cpu())
    refuse(problems, name)
    return Ragged.from_list(found, torch.bool)


def _at_depth(value: Any, depth: int) -> list[Any]:
    return [leaf for part in as_list(value) for leaf in _at_depth(part, depth - 1)] if depth else [value]


def _must_be_as_long(cells: Ragged, mask: Ragged, name: str) -> None:
    """Refuse a mask whose rows are not as long as those of the ids."""
    if torch.equal(cells.lengths, mask.lengths):
        return
    lengths = zip(cells.lengths.tolist(), mask.lengths.tolist(), strict=False)
    problems = {row: f"{n} tokens, but a mask of {m}" for row, (n, m) in enumerate(lengths) if n != m}
    if len(mask) != len(cells):
        problems = {len(mask): "no mask"} if len(mask) < len(cells) else {len(cells): "a mask, but no tokens"}
    refuse(problems, name)


def _select(values: Ragged, mask: Ragged | None) -> Ragged:
    """Return the values where a mask of the same lengths is True; all without a mask."""
    return values if mask is None else Ragged(values.values[mask.values], mask.sums())


def _dense_rows(values: Tensor) -> Ragged:
    """Return the rows of ``[*batch, width]``, each with all of its columns, on the CPU."""
    count, width = math.prod(values.shape[:-1]), values.shape[-1]
    return Ragged(values.cpu().reshape(-1), torch.full((count,), width))


def _refuse_pads(held: Any, cells: Ragged | None, top: str, name: str, backend: Backend) -> None:
    """Refuse ids without a mask of which a row begins or ends with pads.

    Args:
        held: `Tokens`, of which all fields are looked at, or bare ids.
        cells: the ids that are read; None if they are no dense tensor, which has no pads unless `Tokens` hold it.
        top: the key of the ids or of their container.
        name: the key of the ids that are read.
        backend: has the tokenizer.
    """
    values = {} if cells is None else {name: cells}
    if isinstance(held, Tokens):
        parts = [part for part in ("prompt", "response", "full") if part in held.keys()]
        values = {f"{top}.{part}": _cells(held, part, name)[0] for part in parts if nested_field(held, part) is None}
    engine = backend.engine
    for field, value in values.items():
        refuse_pads(value, engine.tokenizer, engine.eos_token_ids, field, _PADS_ADVICE)


def input_ids_of(td: TensorDictBase, top: Key, value: Any, part: str) -> tuple[TensorDictBase, Key] | None:
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


def nested_field(container: Tokens, part: str) -> Tensor | None:
    """Return a field if it is a nested tensor, else None."""
    try:
        value = getattr(container, part) if container.padded else None
    except InvalidRequestError:  # rows that are padded to different widths
        return None
    return value if isinstance(value, Tensor) and value.is_nested else None


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


def _no_pads(mask: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{mask}: tokens in rows of unequal length (padded=False) have no pads; leave their attention mask out, or, if "
        "the rows do hold pads, make the Tokens with padded=True",
        field="masks",
    )


# Which attention mask belongs to the ids -----------------------------------------------------------------------------


def mask_next_to(
    td: TensorDictBase, top: Key, held: Any, *, plain: bool, answered: bool, in_rows: bool, has_masks: bool
) -> Key | None:
    """Return the key of the `attention_mask` that belongs to the ids under the key `top`; None if there is none.

    It is in the plain TensorDict that holds the ids, or next to `top`. Its name may begin as that of the ids does:
    ``chosen_attention_mask`` for ``chosen_input_ids``. A mask of another shape belongs to the `input_ids` next to it if
    it has theirs, and it may be that of the prompts whose answers a container without pads or with responses holds.

    Args:
        td: holds the ids.
        top: the key of the ids, or of the container that holds them.
        held: the ids, or `Tokens`.
        plain: whether a plain TensorDict holds the ids.
        answered: whether they are held with responses to them.
        in_rows: whether they are in rows of unequal length, which have no pads.
        has_masks: whether there is an attention mask in the `Masks`, which is read if this one has another shape.

    Raises:
        InvalidRequestError: the mask has another shape, or would hide tokens of rows that should have no
            pads, or of an answer, to which it need not belong.
    """
    container = isinstance(held, Tokens)
    *path, own = top
    stem = own.removesuffix("input_ids") if own.endswith("input_ids") else own.removesuffix("ids")
    keys = [(*top, "attention_mask")] if plain else []
    keys += [(*path, f"{stem}attention_mask")] if stem not in (own, "") else []
    misfit = None
    for key in (*keys, (*path, "attention_mask")):
        if (given := find_value(td, key)) is None:
            continue
        name, depth = ".".join(key), len(held.batch_size) if container else 1
        lengths = _lengths(held)
        mask = None
        with suppress(InvalidRequestError):
            mask = _as_rows(given, depth, name, why_not=unreadable)
        fits = mask is not None and mask.lengths.tolist() == lengths
        if answered or in_rows:
            if mask is not None and fits and not bool(mask.values.all()):
                raise _unclear(name) if answered else _no_pads(name)
        elif fits:
            return key
        elif key[-1] != "attention_mask" or mask is None or not _is_of_input_ids(td, key, mask, top):
            misfit = misfit or key
    if misfit is None or has_masks:
        return None
    if container or plain:
        raise InvalidRequestError(
            f"{'.'.join(misfit)}: its rows are not as wide as those of the tokens under {'.'.join(top)!r}; give the "
            "mask of prompt and response together if both are read, or delete it",
            field="masks",
        )
    return misfit


def _is_of_input_ids(td: TensorDictBase, key: Key, mask: Ragged, top: Key) -> bool:
    """Return whether a mask belongs to `input_ids` next to it, where the policy reads something else."""
    other = (*key[:-1], "input_ids")
    return other != top and mask.lengths.tolist() == _lengths(find_value(td, other))


def _lengths(held: Any) -> list[int] | None:
    """Return the lengths of rows of ids with their pads; None if these are no ids."""
    part = "full" if isinstance(held, Tokens) and "full" in held.keys() else "prompt"
    try:
        return _cells(held, part, "")[0].lengths.tolist()
    except InvalidRequestError:
        return None


def _unclear(mask: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{mask}: it has the shape of the answers that the TensorDict holds, but may be that of their prompts; give "
        f"the policy attention_mask_key={mask!r} to apply it, or delete it",
        field="masks",
    )
