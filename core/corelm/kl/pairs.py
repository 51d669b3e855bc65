"""Two scorings of the same tokens, out of a TensorDict: flat, lined up, and held against each other.

Which positions count: those scored in both, and selected. Rows that are laid out differently, log-probs of different
distributions and such as are not finite are refused, by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from corelm.containers.classes import LogProbs, Masks, ragged
from corelm.containers.field_access import rows
from corelm.errors import InvalidRequestError, MissingKeyError, Problems, ProvenanceMismatchError, refuse
from corelm.kl.layout import TokenLayout, find, parts
from corelm.tensors.ragged import Ragged


@dataclass(frozen=True, slots=True)
class PairKeys:
    """Where two scorings are read, and which positions of them count.

    Attributes:
        gen, ref: the field `full` of a `LogProbs`.
        masks: the `Masks` of the policy's own output.
        mask: bool, shaped as ``tokens.full``: a field of a `Masks`, or a dense tensor. None counts every token.
    """

    gen: NestedKey
    ref: NestedKey
    masks: NestedKey
    mask: NestedKey | None

    def __post_init__(self) -> None:
        for key in (self.gen, self.ref):
            if len(parts(key)) < 2 or parts(key)[-1] != "full":
                raise InvalidRequestError(f"{key!r}: expected the key of a LogProbs and 'full'", field=str(key))

    @staticmethod
    def selecting(
        gen: NestedKey, ref: NestedKey, masks: NestedKey, assistant_only: bool, mask: NestedKey | None
    ) -> PairKeys:
        if mask is None and assistant_only:
            mask = (*parts(masks), "all_assistant_mask")
        return PairKeys(gen, ref, masks, mask)

    @property
    def read(self) -> list[NestedKey]:
        return [self.gen, self.ref, *([] if self.mask is None else [self.mask])]


@dataclass(frozen=True, eq=False)
class Pair:
    """Two scorings of the same tokens, flat, row after row.

    Attributes:
        gen, ref: float[total], on one device.
        mask: bool[total]: scored in both, and selected.
    """

    gen: Tensor
    ref: Tensor
    mask: Tensor
    layout: TokenLayout


def read_pair(td: TensorDictBase, keys: PairKeys, *, allow_mismatch: bool) -> Pair:
    """Read two scorings and the positions that count.

    Raises:
        MissingKeyError: one of them, or the mask, is not there.
        InvalidRequestError: they are not laid out alike, row by row, or a log-prob that counts is not finite; `rows`
            says where.
        ProvenanceMismatchError: they are of different distributions, and that is not allowed.
    """
    gen, here = _log_probs(td, keys.gen)
    ref, _ = _log_probs(td, keys.ref)
    view = _view(td, here, keys, gen=gen, ref=ref)
    if tuple(gen.batch_size) != tuple(ref.batch_size):
        raise _differ(keys, f"batches {tuple(gen.batch_size)} and {tuple(ref.batch_size)}")
    if not allow_mismatch:
        _same_distribution(gen, ref, keys)
    layout = _layout(view, gen)
    if layout.padded != _is_dense(ref):
        kinds = {True: "dense", False: "one row a sample"}
        raise _differ(keys, f"{kinds[layout.padded]} and {kinds[not layout.padded]}; score with the same pad_output")
    gen_values, gen_scored = _flat(view, "gen", gen, keys.gen, layout)
    ref_values, ref_scored = _flat(view, "ref", ref, keys.ref, layout)
    refuse(_length_problems(gen_values.lengths, ref_values.lengths, keys.gen, keys.ref), str(keys.ref))
    if layout.padded and "scored_mask" in ref.keys():
        _refuse_a_shift(gen_scored, ref_scored, keys.ref, layout)
    device = gen_values.values.device
    mask = gen_scored.to(device) & ref_scored.to(device)
    if keys.mask is not None:
        mask &= _selected(td, here, view, keys, layout).to(device)
    pair = Pair(gen_values.values, ref_values.values.to(device), mask, layout)
    _finite(pair, keys)
    return pair


def _log_probs(td: TensorDictBase, key: NestedKey) -> tuple[LogProbs, TensorDictBase]:
    path = parts(key)[:-1]
    container, here = find(td, path)
    if not isinstance(container, LogProbs):
        raise InvalidRequestError(
            f"{path!r}: expected a LogProbs, got {type(container).__name__}; log-probs made by hand become one "
            "with LogProbs(full=tensor, batch_size=[...])",
            field=str(key),
        )
    if "full" not in container.keys():
        raise MissingKeyError(f"the LogProbs under {path!r} hold no 'full'", field=str(key))
    return container, here


def _view(td: TensorDictBase, here: TensorDictBase, keys: PairKeys, **scorings: LogProbs) -> TensorDict:
    """The scorings and the masks beside the first of them, wherever they were."""
    gen = scorings["gen"]
    view = TensorDict(dict(scorings), batch_size=td.batch_size)
    try:
        masks, _ = find(td, keys.masks, first=here)
    except MissingKeyError:
        if not _is_dense(gen):
            return view
        # Log-probs made by hand, without pads.
        masks = Masks(all_attention_mask=torch.ones_like(gen.full, dtype=torch.bool), batch_size=gen.batch_size)
    if not isinstance(masks, Masks):
        raise InvalidRequestError(f"{keys.masks!r}: expected Masks, got {type(masks).__name__}", field=str(keys.masks))
    view["masks"] = masks
    return view


def _is_dense(container: LogProbs) -> bool:
    """Whether the rows are one tensor. Dense rows of different widths are not: they are read row by row."""
    try:
        return container.padded is True and isinstance(container.full, Tensor)
    except InvalidRequestError:
        return False


def _layout(view: TensorDict, gen: LogProbs) -> TokenLayout:
    batch = tuple(gen.batch_size)
    if _is_dense(gen):
        mask = view["masks"].all_attention_mask
        if not isinstance(mask, Tensor) or tuple(mask.shape[:-1]) != batch:
            found = list(mask.shape) if isinstance(mask, Tensor) else "none that is dense"
            raise InvalidRequestError(
                f"dense log-probs of {list(gen.full.shape)} need an attention mask of that shape, to tell tokens from "
                f"pads; got {found}",
                field="masks",
            )
        columns = mask.reshape(math.prod(batch), mask.shape[-1]).to(torch.bool)
        return TokenLayout(batch, columns.sum(-1).cpu(), True, lambda: columns)
    lengths = ragged(view, ("gen", "full")).lengths

    def find_columns() -> Tensor:
        if "prompt" not in gen.keys() or "response" not in gen.keys():
            return Ragged.full(lengths, True, torch.bool).mask("right")
        return torch.cat([ragged(view, ("gen", "prompt")).mask("left"), ragged(view, ("gen", "response")).mask()], -1)

    return TokenLayout(batch, lengths, False, find_columns)


def _flat(
    view: TensorDict, name: str, container: LogProbs, key: NestedKey, layout: TokenLayout
) -> tuple[Ragged, Tensor]:
    """The log-probs, and bool[total]: which are scored. Of a container made by hand all are."""
    told = "scored_mask" in container.keys()
    if not layout.padded:
        values = ragged(view, (name, "full"))
        marks = ragged(view, (name, "scored_mask")) if told else Ragged.full(values.lengths, True, torch.bool)
        refuse(_length_problems(values.lengths, marks.lengths, key, "its scored_mask"), str(key))
        return values, marks.values.to(torch.bool)
    values = layout.ragged(layout.flat(container.full, key))
    if not told:
        return values, torch.ones_like(values.values, dtype=torch.bool)
    dense = container.scored_mask
    scored = layout.flat(dense, key).to(torch.bool)
    if int(dense.sum()) != int(scored.sum()):
        _refuse_other_columns(dense, key, layout)
    return values, scored


def _selected(
    td: TensorDictBase, here: TensorDictBase, view: TensorDict, keys: PairKeys, layout: TokenLayout
) -> Tensor:
    """bool[total]"""
    assert keys.mask is not None
    *path, name = parts(keys.mask)
    container = find(td, tuple(path), first=here)[0] if path else None
    if isinstance(container, Masks) and name not in container.keys():
        there = ", ".join(sorted(set(container.keys()) - {"padded"}))
        raise MissingKeyError(
            f"the masks say nothing of {name!r}, only of {there}; name another one with mask_key=, or count every "
            "scored token with assistant_only=False",
            field=str(keys.mask),
        )
    if isinstance(container, Masks) and not layout.padded:
        selected = ragged(TensorDict({"own": container}, batch_size=td.batch_size), ("own", name), masks="own")
        refuse(_length_problems(selected.lengths, layout.lengths, keys.mask, keys.gen), str(keys.mask))
        return selected.values.to(torch.bool)
    mask = getattr(container, name) if isinstance(container, Masks) else find(td, keys.mask, first=here)[0]
    if isinstance(mask, Tensor) and mask.dtype.is_floating_point:
        raise InvalidRequestError(f"{keys.mask}: expected bool, got {mask.dtype}", field=str(keys.mask))
    return layout.flat(mask, keys.mask).to(torch.bool)


# What must hold ------------------------------------------------------------------------------------------------------


def _length_problems(first: Tensor, second: Tensor, one: Any, other: Any) -> Problems:
    if first.shape != second.shape:
        raise InvalidRequestError(f"{one} has {len(first)} rows and {other} {len(second)}", field=str(other))
    return {
        row: f"{one} has {int(first[row])} tokens and {other} {int(second[row])}"
        for row in (first != second).nonzero().flatten().tolist()
    }


def _refuse_other_columns(scored: Tensor, key: NestedKey, layout: TokenLayout) -> None:
    """Dense log-probs scored where the masks have a pad were laid out in other columns."""
    outside = (scored.reshape(layout.columns.shape) & ~layout.columns.to(scored.device)).any(-1)
    what = f"{key} is scored where the masks have a pad, so its columns are others; score the tokens themselves"
    refuse(dict.fromkeys(outside.nonzero().flatten().tolist(), what), str(key))


def _refuse_a_shift(gen: Tensor, ref: Tensor, key: NestedKey, layout: TokenLayout) -> None:
    """Columns that are off by one may hold no pad that is scored; but then a row's first token is, which nothing
    precedes.
    """
    marks = layout.ragged((ref & ~gen.to(ref.device)).cpu())
    first = marks.row_index[marks.values & (marks.positions == 0)]
    what = f"{key} is scored at the first token, so its columns are others than the masks'; score the tokens themselves"
    refuse(dict.fromkeys(first.tolist(), what), str(key))


def _finite(pair: Pair, keys: PairKeys) -> None:
    problems: Problems = {}
    for values, key in ((pair.ref, keys.ref), (pair.gen, keys.gen)):
        bad = (pair.mask & ~torch.isfinite(values.detach())).nonzero().flatten().cpu()
        where = pair.layout.ragged(values)
        in_rows = where.row_index[bad]
        for index in bad[in_rows.diff(prepend=torch.tensor([-1])) > 0].tolist():  # the first of each row
            row, position = int(where.row_index[index]), int(where.positions[index])
            problems[row] = f"{key} is {float(values[index])} at position {position}"
    refuse(problems, "log-probs")


def _same_distribution(gen: LogProbs, ref: LogProbs, keys: PairKeys) -> None:
    """Log-probs made by hand say nothing of where they came from, and are taken as they are."""
    kinds = {one.distribution for container in (gen, ref) for one in _provenances(container)}
    if len(kinds) < 2:
        return
    for row, (one, other) in enumerate(zip(rows(gen), rows(ref), strict=True)):
        a, b = one.provenance, other.provenance
        if a is not None and b is not None and not a.matches(b):
            raise ProvenanceMismatchError(
                f"row {row}: {keys.gen} and {keys.ref} are of different distributions and their difference means "
                f"nothing: {a} and {b}; score both the same way (log_probs_mode=, temperature), or pass "
                "allow_mismatch=True"
            )


def _provenances(container: LogProbs) -> tuple[Any, ...]:
    found = container.provenance
    return () if found is None else found if isinstance(found, tuple) else (found,)


def _differ(keys: PairKeys, how: str) -> InvalidRequestError:
    return InvalidRequestError(f"{keys.gen} and {keys.ref} are laid out differently: {how}", field=str(keys.ref))
