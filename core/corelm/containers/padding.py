"""`repad` and `collate`: rows of different lengths as a dense minibatch, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from corelm.containers.classes import Masks, PerToken
from corelm.containers.dense_layout import DenseLayout, dense_layouts, dense_mask
from corelm.containers.keys import key_parts, list_keys
from corelm.containers.reading import PER_TOKEN, Path, entries_per_token, must_have_batch, per_token_of_rows
from corelm.errors import InvalidRequestError
from corelm.validate import invalid


def repad(
    td: TensorDictBase,
    *,
    pad_output: bool = True,
    pad_id: int = 0,
    per_token: Sequence[NestedKey] | None = None,
) -> TensorDict:
    """Return the rows of `td` in the other layout, or as narrow as they can be: what ``pad_output`` would have given.

    Rows that keep their own lengths become dense: prompts padded left, responses right, unsplit rows right. Dense rows
    get the width that they need: a slice of a dense batch loses the columns that hold only pads, and dense rows of
    different widths (`tensordict.lazy_stack`) become one batch::

        minibatch = corelm.repad(rollout[indices])
        rows = corelm.repad(minibatch, pad_output=False)

    All numbers stay exactly what they are, and gradients flow through the log-probs. Pads of values per token are 0.0,
    those of integers, such as `argmax`, -1. Entries without values per token
    are those of `td`, not copies. Dense containers without a `Masks` next to them get one, because nothing else tells
    their lengths.

    Args:
        td: what a policy returned, a slice or a stack of it, or a TensorDict that holds such; may be a single row.
        pad_output: True for dense tensors, False for one tensor a row.
        pad_id: the id in the pads of dense tokens. Policies use ``backend.pad_id``.
        per_token: the keys of plain tensors ``[*batch, width]``, such as advantages, whose columns are those of
            ``tokens.full``. They are laid out with the tokens: as a plain tensor in a dense batch, as a `PerToken` in
            rows. ``[]`` says that there are none. None refuses tensors that may be such. An `argmax` need not be named.

    Raises:
        InvalidRequestError: a tensor is as wide as the dense tokens, and `per_token` does not say whether its columns
            are theirs; dense tokens have no masks; rows of a container have other lengths than the tokens; the tensors
            of an entry have different shapes. `field` names the entry.
    """
    if not isinstance(td, TensorDictBase):
        raise invalid("td", f"expected a TensorDict, such as a policy returns, got {type(td).__name__}")
    shape = tuple(td.batch_size)
    found = dict(entries_per_token(td))
    containers = {path: value for path, value in found.items() if isinstance(value, PER_TOKEN)}
    for path, container in containers.items():
        must_have_batch(td, path, container)
    named = {} if per_token is None else _as_per_token(td, containers, found, [key_parts(key) for key in per_token])
    found |= named
    containers |= named
    held = TensorDict({}, batch_size=shape)
    for path, container in containers.items():
        held.set(path, container)
    layouts = dense_layouts(held, containers)
    if per_token is None:
        _refuse_unnamed(found, layouts, len(shape), pad_output)
    out = TensorDict({}, batch_size=shape, device=td.device)
    for path, value in found.items():
        if isinstance(value, list):
            raise _unequal_shapes(".".join(path))
        if path in containers:
            value = layouts[path[:-1]].container(held, path, pad_output=pad_output, pad_id=pad_id)
        out.set(path, value)
    if pad_output:
        _add_masks(out, layouts, containers)
    return out


def collate(
    rows: Sequence[TensorDictBase] | TensorDictBase,
    *,
    pad_output: bool = True,
    pad_id: int = 0,
    per_token: Sequence[NestedKey] | None = None,
) -> TensorDict:
    """Return one batch of rows, in either layout and of any widths: a ``collate_fn`` for torch's DataLoader.

    ::

        DataLoader(rollout, batch_size=8, shuffle=True, collate_fn=corelm.collate)
        both = corelm.collate([*rollout_1, *rollout_2])      # dense rollouts of different widths

    Args:
        rows: TensorDicts of the same batch size with the same keys; a TensorDict is taken as it is.
        pad_output: as in `repad`.
        pad_id: as in `repad`.
        per_token: as in `repad`.

    Raises:
        InvalidRequestError: there are no rows, or a row has other keys or another batch size than the first; and the
            errors of `repad`.
    """
    td = rows if isinstance(rows, TensorDictBase) else _stacked(rows)
    return repad(td, pad_output=pad_output, pad_id=pad_id, per_token=per_token)


def _stacked(rows: Sequence[TensorDictBase]) -> TensorDictBase:
    if not isinstance(rows, Sequence) or not rows:
        raise invalid("rows", "expected a list of TensorDicts with at least one row")
    first = _keys(rows, 0)
    for number in range(1, len(rows)):
        differ = _keys(rows, number) ^ first
        if differ:
            # lazy_stack would drop them silently.
            names = ", ".join(sorted(".".join(key) for key in differ))
            raise invalid("rows", f"row {number} and row 0 have different keys; only one of them has {names}")
        if rows[number].batch_size != rows[0].batch_size:
            sizes = f"{tuple(rows[number].batch_size)} and {tuple(rows[0].batch_size)}"
            raise invalid("rows", f"row {number} and row 0 have different batch sizes: {sizes}")
    return lazy_stack(list(rows))


def _keys(rows: Sequence[Any], number: int) -> set[Path]:
    if not isinstance(rows[number], TensorDictBase):
        raise invalid("rows", f"expected TensorDicts, but row {number} is a {type(rows[number]).__name__}")
    keys = {key_parts(key) for key in rows[number].keys(include_nested=True)}
    # `padded` only says how a row is stored, and rows of both layouts may be mixed.
    return {key for key in keys if key[-1] != "padded"}


def _as_per_token(
    td: TensorDictBase, containers: Mapping[Path, Any], found: Mapping[Path, Any], named: Sequence[Path]
) -> dict[Path, PerToken]:
    """Return the named tensors as `PerToken`, in the layout of the tokens that they belong to."""
    made: dict[Path, PerToken] = {}
    for path in named:
        name, value = ".".join(path), found.get(path)
        if isinstance(value, PerToken):
            continue
        if not isinstance(value, (Tensor, list)):
            raise invalid("per_token", f"{name} is not a tensor of this TensorDict, which has: {list_keys(td)}")
        beside = [one for parent in (path[:-1], ()) for key, one in containers.items() if key[:-1] == parent]
        if not beside:
            raise invalid("per_token", f"there are no tokens that {name} could belong to")
        masks = next((one for one in beside if isinstance(one, Masks)), beside[0])
        made[path] = _per_token(name, value, masks, tuple(td.batch_size))
    return made


def _per_token(name: str, value: Tensor | list[Tensor], beside: Any, shape: tuple[int, ...]) -> PerToken:
    before = dense_mask(beside) if isinstance(beside, Masks) else None
    if isinstance(value, Tensor) and before is not None:
        wanted = [*shape, before.shape[-1]]
        if list(value.shape) != wanted:
            raise invalid("per_token", f"{name}: expected shape {wanted}, like the masks; got {list(value.shape)}")
        return PerToken(full=value, batch_size=shape)
    values = value if isinstance(value, list) else list(value.reshape(math.prod(shape), *value.shape[len(shape) :]))
    if any(one.ndim != 1 for one in values):
        raise invalid("per_token", f"{name}: expected one value per token, so [tokens] in each row")
    return per_token_of_rows(values, beside, shape)


def _refuse_unnamed(
    found: Mapping[Path, Any], layouts: Mapping[Path, DenseLayout], dims: int, pad_output: bool
) -> None:
    """Refuse plain tensors that may belong to the tokens and would no longer line up with them."""
    for path, value in found.items():
        layout = layouts.get(path[:-1], layouts.get(()))
        if layout is None or layout.before is None or not isinstance(value, Tensor) or value.ndim <= dims:
            continue
        stays = pad_output and torch.equal(layout.before, layout.columns.mask)
        if value.shape[dims] == layout.before.shape[-1] > 1 and not stays:
            name = ".".join(path)
            raise InvalidRequestError(
                f"{name} is as wide as the dense tokens. Pass per_token=[{name!r}] if its columns are theirs, so that "
                "both stay aligned, or per_token=[] to keep it as it is",
                field=name,
            )


def _add_masks(out: TensorDict, layouts: Mapping[Path, DenseLayout], containers: Mapping[Path, Any]) -> None:
    masked = {path[:-1] for path, value in containers.items() if isinstance(value, Masks)}
    for parent, layout in layouts.items():
        if not masked & {parent, ()} and (*parent, "masks") not in out.keys(include_nested=True):
            out.set((*parent, "masks"), layout.masks(tuple(out.batch_size)))
            masked.add(parent)


def _unequal_shapes(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name}: its rows have different shapes, so they do not form one tensor. Pass per_token=[{name!r}] if it has "
        f"one value per token; else leave it out: td.exclude({name!r})",
        field=name,
    )
