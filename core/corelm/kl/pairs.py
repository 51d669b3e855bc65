"""Read two scorings of the same tokens from a TensorDict as flat, aligned values, and store values like the tokens.

The KL modules compute on flat values: one float per token, row after row. A position counts if both scorings scored it
and the mask selects it. Scorings of other tokens, in other layouts, of other distributions or over other ids, and
log-probs that are not finite, raise errors that name the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from corelm.containers.classes import COUNTS, LogProbs, Masks
from corelm.containers.reading import (
    TokenRows,
    carries_sets,
    container_of,
    find_entry,
    is_dense,
    key_parts,
    provenance_of_rows,
    token_sets,
)
from corelm.errors import InvalidRequestError, MissingKeyError, ProvenanceMismatchError, refuse
from corelm.spec.provenance import Provenance
from corelm.tensors.ragged import as_mask
from corelm.validate import invalid

_SUPPORT_ADVICE = (
    'sample with return_support=True and log_probs_mode="processed", and score over the ids of the sampler with '
    "LLMPolicy(…, generate=False, support_key=…); or pass allow_mismatch=True"
)
_OTHER_COLUMNS = "so its columns are not those of the masks; score the tokens of this batch, id for id"


@dataclass(frozen=True, slots=True)
class PairKeys:
    """Where two scorings and the mask that selects positions are, as the arguments of `KLComputation` say.

    Attributes:
        gen: the field `full` of the policy's `LogProbs`.
        ref: the field `full` of the reference's `LogProbs`.
    """

    gen: NestedKey
    ref: NestedKey
    masks: NestedKey
    assistant_only: bool
    mask: NestedKey | None
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        for name in ("gen", "ref"):
            object.__setattr__(self, name, full_key(getattr(self, name)))

    @property
    def selecting(self) -> list[NestedKey]:
        """The mask that selects positions; none selects every token."""
        if self.mask is None and self.assistant_only:
            return [(*key_parts(self.masks), "all_assistant_mask")]
        return [] if self.mask is None else [self.mask]

    @property
    def read(self) -> list[NestedKey]:
        return [self.gen, self.ref, *self.selecting]


class Pair(NamedTuple):
    """Two scorings of the same tokens, flat, row after row, on one device.

    Attributes:
        gen: float[total], the policy's log-probs; 0.0 where the mask is False.
        ref: float[total], the reference's log-probs; 0.0 where the mask is False.
        mask: bool[total], the positions that count: scored in both, and selected.
        rows: the tokens.
    """

    gen: Tensor
    ref: Tensor
    mask: Tensor
    rows: TokenRows


def read_pair(td: TensorDictBase, keys: PairKeys) -> Pair:
    """Read two scorings and the positions that count. Errors are those of `KLComputation`."""
    rows, here = rows_of(td, keys.gen, keys.masks)
    gen, (ref, _) = rows.td.get(key_parts(keys.gen)[:-1]), find_log_probs(td, keys.ref)
    kinds = [f"batch {tuple(one.batch_size)}, {'dense' if is_dense(one) else 'one row a sample'}" for one in (gen, ref)]
    if kinds[0] != kinds[1]:
        raise InvalidRequestError(
            f"{keys.gen} and {keys.ref} have different layouts: {kinds[0]}; and {kinds[1]}; score both with the same "
            "batch and pad_output",
            field=str(keys.ref),
        )
    rows.td.set(key_parts(keys.ref)[:-1], ref)
    if not keys.allow_mismatch:
        _check_labels(rows, keys)
    (values, scored), (others, also) = (scores(rows, key) for key in (keys.gen, keys.ref))
    others, also, scored = others.to(values.device), also.to(values.device), scored.to(values.device)
    if rows.mask is not None and "scored_mask" in ref.keys():
        # Columns that are off by one may score no pad. They then score a row's first token, which has no log-prob
        # because no token precedes it.
        shifted = (rows.first(also & ~scored) == 0) & (rows.lengths > 0)
        what = f"it is scored at the first token, {_OTHER_COLUMNS}"
        refuse(dict.fromkeys(shifted.nonzero().flatten().tolist(), what), str(keys.ref))
    mask, selecting, masks = scored & also, keys.selecting, rows.td.get(keys.masks, None)
    if selecting and keys.mask is None and masks is not None and "all_response_mask" in masks.keys():
        # The assistant's turns in a prompt are examples. Once they are scored, they would count as sampled.
        selecting.append((*key_parts(keys.masks), "all_response_mask"))
    for key in selecting:
        mask &= _selected(rows, td, here, key).to(values.device)
    if not keys.allow_mismatch:
        _check_sets(rows, keys, mask)
    refuse(rows.not_finite(others, mask, keys.ref) | rows.not_finite(values, mask, keys.gen), "log-probs")
    # Nothing downstream sees what is stored where a position does not count, not even a caller's own estimator.
    return Pair(torch.where(mask, values, 0.0), torch.where(mask, others, 0.0), mask, rows)


def rows_of(td: TensorDictBase, key: NestedKey, masks_key: NestedKey) -> tuple[TokenRows, TensorDictBase]:
    """Return the tokens of the scoring at `key`, with its masks, and the TensorDict that holds it."""
    path, (log_probs, here) = key_parts(key)[:-1], find_log_probs(td, key)
    view = TensorDict({path: log_probs}, batch_size=())
    try:
        masks, _ = find_entry(td, masks_key, first=here)
        if not isinstance(masks, Masks):
            raise invalid(str(masks_key), f"expected Masks, got {type(masks).__name__}")
        view.set(masks_key, masks)
    except MissingKeyError:
        if is_dense(log_probs):
            # The caller built the log-probs; without masks they have no pads.
            everything = torch.ones_like(log_probs.full, dtype=torch.bool)
            view.set(masks_key, Masks(all_attention_mask=everything, batch_size=log_probs.batch_size))
    return TokenRows(view, [path], masks_key), here


def scores(rows: TokenRows, full: NestedKey) -> tuple[Tensor, Tensor]:
    """Return the log-probs under the key `full`, float[total], and bool[total], which tokens have one."""
    path = key_parts(full)[:-1]
    values, scored = rows.log_probs(path)
    if rows.mask is not None and "scored_mask" in rows.td.get(path).keys():
        outside = ((dense := rows.td.get(path).scored_mask.reshape(rows.mask.shape)) != 0) & ~rows.mask.to(dense.device)
        what = f"it is scored where the masks have a pad, {_OTHER_COLUMNS}"
        refuse(dict.fromkeys(outside.any(-1).nonzero().flatten().tolist(), what), str(full))
    return values.values, scored.values


def _selected(rows: TokenRows, td: TensorDictBase, here: TensorDictBase, key: NestedKey) -> Tensor:
    """Return bool[total]: which positions the mask under `key` selects."""
    *path, name = key_parts(key)
    masks = find_entry(td, tuple(path), first=here)[0] if path else None
    if not isinstance(masks, Masks):
        return as_mask(rows.flat(find_entry(td, key, first=here)[0], key), str(key))
    if name not in masks.keys():
        fields = ", ".join(sorted(set(masks.keys()) - {"padded"}))
        raise MissingKeyError(
            f"the masks have no field {name!r}, only {fields}; pass mask_key= to use another one, or count every "
            "scored token with assistant_only=False",
            field=str(key),
        )
    rows.td.set(tuple(path), masks)
    return as_mask(rows.read(key).values, str(key))


def full_key(key: NestedKey) -> tuple[str, ...]:
    """Return the key of the field `full` of a `LogProbs`, given that or the key of the `LogProbs`."""
    path = key_parts(container_of(key))
    if path[-1] in LogProbs.__dataclass_fields__:
        raise invalid(str(key), "expected the key of a LogProbs, or of its field full: ('log_probs', 'full')")
    return (*path, "full")


def find_log_probs(td: TensorDictBase, key: NestedKey) -> tuple[LogProbs, TensorDictBase]:
    """Return the `LogProbs` whose field `full` has the given key, and the TensorDict that holds it."""
    path = key_parts(key)[:-1]
    try:
        container, here = find_entry(td, path)
    except MissingKeyError as error:
        raise MissingKeyError(
            f"{error}. To write it, score the same tokens: LLMPolicy(backend, input_mode='tokens', generate=False, "
            f"log_probs_key={path[0] if len(path) == 1 else path!r})(td)",
            field=str(key),
        ) from None
    if not isinstance(container, LogProbs):
        raise InvalidRequestError(
            f"{path!r}: expected a LogProbs, got {type(container).__name__}; wrap your own log-probs in "
            "LogProbs(full=tensor, batch_size=[...])",
            field=str(key),
        )
    if "full" not in container.keys():
        raise MissingKeyError(f"the LogProbs under {path!r} has no field 'full'", field=str(key))
    return container, here


# Distributions --------------------------------------------------------------------------------------------------------


def _check_labels(rows: TokenRows, keys: PairKeys) -> None:
    """Raise if the scorings are of different distributions. Log-probs without a provenance are accepted."""
    for row, (one, other) in enumerate(_labels(rows, keys)):
        if one is None or other is None or one.matches(other):
            continue
        if "truncated" in (one.support, other.support):
            one = replace(one, support="full") if _keeps_all(rows, keys.gen, row) else one
            other = replace(other, support="full") if _keeps_all(rows, keys.ref, row) else other
            if one.matches(other):
                continue
        truncated = "truncated" in (one.support, other.support)
        how = "over the same ids (support_key=…)" if truncated else "with the same log_probs_mode"
        raise ProvenanceMismatchError(
            f"row {row}: {keys.gen} and {keys.ref} are of different distributions, so their difference has no meaning: "
            f"{_distribution(one)}; and {_distribution(other)}. Score both {how} and temperature, or pass "
            "allow_mismatch=True"
        )


def _labels(rows: TokenRows, keys: PairKeys) -> Iterator[tuple[Provenance | None, Provenance | None]]:
    gen, ref = (rows.td.get(key_parts(key)[:-1]) for key in (keys.gen, keys.ref))
    count = len(rows.lengths)
    return zip(provenance_of_rows(gen, count), provenance_of_rows(ref, count), strict=True)


def _keeps_all(rows: TokenRows, full: NestedKey, row: int) -> bool:
    """Return whether a scoring says that no id was left out at any token of a row."""
    path = key_parts(full)[:-1]
    return carries_sets(rows.td.get(path)) and not bool(rows.read((*path, COUNTS)).split()[row].any())


def _check_sets(rows: TokenRows, keys: PairKeys, mask: Tensor) -> None:
    """Raise if two truncated scorings were normalised over different ids, which their labels do not tell."""
    cut = [all(one is not None and one.support == "truncated" for one in pair) for pair in _labels(rows, keys)]
    where = rows.ragged(mask.cpu())
    counts = where.values & torch.tensor(cut, dtype=torch.bool)[where.row_index]
    if not bool(counts.any()):
        return
    sets = []
    for full in (keys.gen, keys.ref):
        path = key_parts(full)[:-1]
        if not carries_sets(rows.td.get(path)):
            raise ProvenanceMismatchError(
                f"row {int(where.row_index[counts][0])}: both scorings are of truncated support, and {full} does not "
                f"say which ids were left, so nothing shows that they are of one distribution; {_SUPPORT_ADVICE}"
            )
        rows.read((*path, COUNTS))
        sets.append(token_sets(rows.td, path, masks=rows.masks))
    for at in (counts & ~sets[0].same_as(sets[1])).nonzero().flatten().tolist():
        raise ProvenanceMismatchError(
            f"row {int(where.row_index[at])}, position {int(where.positions[at])}: {keys.gen} and {keys.ref} were "
            f"normalised over different ids, so their difference has no meaning; {_SUPPORT_ADVICE}"
        )


def _distribution(one: Provenance) -> str:
    """Return what must agree in two provenances, for a message."""
    mode, temperature, support, penalties = one.distribution
    return ", ".join([f"{mode}, temperature {temperature:g}, {support} support", *(f"{n} {v:g}" for n, v in penalties)])
