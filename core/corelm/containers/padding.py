"""`repad` and `collate`: rows of different lengths as a dense minibatch, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from corelm.containers.assemble import container
from corelm.containers.classes import SETS, LogProbs, Masks, PerToken, must_have_lengths, row_objects
from corelm.containers.reading import (
    PER_TOKEN,
    Path,
    TokenRows,
    as_per_token,
    dense_mask,
    key_parts,
    list_keys,
    masks_of,
    ragged,
    scan,
)
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
        InvalidRequestError: a tensor is as wide as the dense tokens, and `per_token` does not say whether its
            columns are theirs; dense tokens have no masks; rows of a container have other lengths than the
            tokens; the tensors of an entry have different shapes. `field` names the entry.
    """
    if not isinstance(td, TensorDictBase):
        raise invalid("td", f"expected a TensorDict, such as a policy returns, got {type(td).__name__}")
    shape = tuple(td.batch_size)
    found, held = scan(td)
    containers = {path: value for path, value in found.items() if isinstance(value, PER_TOKEN)}
    for key in per_token or ():
        path = key_parts(key)
        if not isinstance(found.get(path), PerToken):
            found[path] = containers[path] = _named(td, path, found.get(path), containers)
            held.set(path, found[path])
    tokens = _tokens_by_parent(held, containers)
    if per_token is None:
        _refuse_unnamed(found, tokens, len(shape), pad_output)
    out = TensorDict({}, batch_size=shape, device=td.device)
    for path, value in found.items():
        if isinstance(value, list):
            name = ".".join(path)
            raise invalid(
                name,
                f"its rows have different shapes, so they do not form one tensor. Pass per_token=[{name!r}] if it has "
                f"one value per token; else leave it out: td.exclude({name!r})",
            )
        if path in containers:
            value = _laid_out(held, path, tokens[path[:-1]], pad_output, pad_id)
        out.set(path, value)
    if pad_output:
        _add_masks(out, tokens, containers)
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
        pad_output, pad_id, per_token: as in `repad`.

    Raises:
        InvalidRequestError: there are no rows, or a row has other keys or another batch size than the first;
            and the errors of `repad`.
    """
    td = rows if isinstance(rows, TensorDictBase) else _stacked(rows)
    return repad(td, pad_output=pad_output, pad_id=pad_id, per_token=per_token)


def _stacked(rows: Sequence[TensorDictBase]) -> TensorDictBase:
    if not isinstance(rows, Sequence) or not rows:
        raise invalid("rows", "expected a list of TensorDicts with at least one row")
    first: set[Path] = set()
    for number, row in enumerate(rows):
        if not isinstance(row, TensorDictBase):
            raise invalid("rows", f"expected TensorDicts, but row {number} is a {type(row).__name__}")
        # `padded` only says how a row is stored, and rows of both layouts may be mixed.
        keys = {path for path in map(key_parts, row.keys(include_nested=True)) if path[-1] != "padded"}
        first = first if number else keys
        if differ := keys ^ first:
            # lazy_stack would drop them silently.
            names = ", ".join(sorted(".".join(key) for key in differ))
            raise invalid("rows", f"row {number} and row 0 have different keys; only one of them has {names}")
        if row.batch_size != rows[0].batch_size:
            sizes = f"{tuple(row.batch_size)} and {tuple(rows[0].batch_size)}"
            raise invalid("rows", f"row {number} and row 0 have different batch sizes: {sizes}")
    return lazy_stack(list(rows))


def _named(td: TensorDictBase, path: Path, value: Any, containers: Mapping[Path, Any]) -> PerToken:
    """Return a tensor that the caller named as a `PerToken`, in the layout of the tokens that it belongs to."""
    name = ".".join(path)
    if not isinstance(value, (Tensor, list)):
        raise invalid("per_token", f"{name} is not a tensor of this TensorDict{list_keys(td, path)}")
    siblings = [one for parent in (path[:-1], ()) for key, one in containers.items() if key[:-1] == parent]
    if not siblings:
        raise invalid("per_token", f"there are no tokens that {name} could belong to")
    masks = next((one for one in siblings if isinstance(one, Masks)), siblings[0])
    made = as_per_token(value, masks)
    if made is None:
        mask = dense_mask(masks)
        wanted = "[tokens] in each row" if mask is None else f"shape {list(mask.shape)}, like the masks"
        got = "other rows" if isinstance(value, list) else list(value.shape)
        raise invalid("per_token", f"{name}: expected one value per token, so {wanted}; got {got}")
    return made


# Where tokens are, and where they go ---------------------------------------------------------------------------------


def _tokens_by_parent(held: TensorDictBase, containers: Mapping[Path, Any]) -> dict[Path, TokenRows]:
    """Return the tokens under every parent key that holds containers with one value per token."""
    found: dict[Path, TokenRows] = {}
    for parent in sorted({path[:-1] for path in containers}, key=len):
        paths = [path for path in containers if path[:-1] == parent]
        made, root = TokenRows(held, paths, masks_of(held, paths[0])), found.get(())
        if root is not None and torch.equal(root.lengths, made.lengths):
            made = replace(made, root=root)
        found[parent] = made
    return found


def _laid_out(held: TensorDictBase, path: Path, tokens: TokenRows, pad_output: bool, pad_id: int) -> Any:
    """Return the container at `path` in the layout asked for. A dense `PerToken` is returned as a plain tensor."""
    given, start = held.get(path), tokens.prompt_lengths
    wanted = {} if start is None else {"prompt": start, "response": tokens.lengths - start}
    fields: dict[str, Any] = {}
    for name in given.keys():
        if name not in ("padded", "provenance"):
            fields[name] = values = ragged(held, (*path, name), masks=tokens.masks)
            if pad_output and name != SETS:
                must_have_lengths(values.lengths, wanted.get(name, tokens.lengths), ".".join((*path, name)))
    labels = row_objects(given._tensordict, "provenance") if isinstance(given, LogProbs) else []
    if any(labels):
        fields["provenance"] = labels
    columns = tokens.narrowest if pad_output else None
    made = container(type(given), fields, tuple(held.batch_size), columns=columns, pad_id=pad_id)
    return made.full if isinstance(made, PerToken) and pad_output else made


def _refuse_unnamed(found: Mapping[Path, Any], tokens: Mapping[Path, TokenRows], dims: int, pad_output: bool) -> None:
    """Refuse plain tensors that may belong to the tokens and would no longer line up with them."""
    for path, value in found.items():
        rows = tokens.get(path[:-1], tokens.get(()))
        if rows is None or not isinstance(value, Tensor) or value.ndim <= dims:
            continue
        masks = (dense_mask(found[at]) for each in (rows, rows.root) if each is not None for at in each.paths)
        mask = next((one for one in masks if one is not None), torch.empty(0))
        stays = pad_output and torch.equal(mask.reshape(-1).bool().cpu(), rows.narrowest.mask.reshape(-1))
        if value.shape[dims] == mask.shape[-1] > 1 and not stays:
            name = ".".join(path)
            raise invalid(
                name,
                f"it is as wide as the dense tokens. Pass per_token=[{name!r}] if its columns are theirs, so that both "
                "stay aligned, or per_token=[] to keep it as it is",
            )


def _add_masks(out: TensorDict, tokens: Mapping[Path, TokenRows], containers: Mapping[Path, Any]) -> None:
    """Add masks that tell tokens from pads, and the responses from the prompts, where there are none."""
    masked = {path[:-1] for path, value in containers.items() if isinstance(value, Masks)}
    for parent, rows in tokens.items():
        if masked & {parent, ()} or (*parent, "masks") in out.keys(include_nested=True):
            continue
        first = out.get(rows.paths[0])
        given = [first] if isinstance(first, Tensor) else first._tensordict.values()
        device = next(value.device for value in given if isinstance(value, Tensor))
        fields = {"all_attention_mask": rows.everywhere.to(device)}
        if rows.prompt_lengths is not None:
            fields["all_response_mask"] = rows.ragged(rows.in_response.to(device))
        out.set((*parent, "masks"), container(Masks, fields, tuple(out.batch_size), columns=rows.narrowest))
        masked.add(parent)
