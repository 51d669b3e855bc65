"""Read two scorings of the same tokens from a TensorDict as flat, aligned values, and store values like the tokens.

The KL modules compute on flat values: one float per token, row after row. A position counts if both scorings scored it
and the mask selects it. Scorings of other tokens, in other layouts, of other distributions or over other ids, and
log-probs that are not finite, raise errors that name the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from corelm.containers.assemble import container, dense_columns
from corelm.containers.classes import COUNTS, WIDE, LogProbs, Masks, PerToken, must_have_lengths
from corelm.containers.reading import (
    carries_sets,
    container_of,
    find_entry,
    key_parts,
    provenance_of_rows,
    ragged,
    token_sets,
)
from corelm.errors import InvalidRequestError, MissingKeyError, Problems, ProvenanceMismatchError, refuse
from corelm.spec.provenance import Provenance
from corelm.spec.records import Columns, Parts
from corelm.tensors.ragged import Ragged, as_mask
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


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """How the tokens of a batch are stored: in dense tensors ``[*batch, width]``, or one row per sample.

    Attributes:
        log_probs: a scoring of the tokens.
        masks: the masks that tell tokens from pads; None if there are none, which only rows allow.
        padded: whether the tokens are stored in dense tensors.
    """

    log_probs: LogProbs
    masks: Masks | None
    padded: bool

    @staticmethod
    def of(td: TensorDictBase, here: TensorDictBase, log_probs: LogProbs, masks_key: NestedKey) -> TokenLayout:
        """Return the layout of a scoring that `here` holds, with the masks that belong to it."""
        padded = is_dense(log_probs)
        try:
            masks, _ = find_entry(td, masks_key, first=here)
        except MissingKeyError:
            if not padded:
                return TokenLayout(log_probs, None, padded)
            # The caller built the log-probs; without masks they have no pads.
            everything = torch.ones_like(log_probs.full, dtype=torch.bool)
            masks = Masks(all_attention_mask=everything, batch_size=log_probs.batch_size)
        if not isinstance(masks, Masks):
            raise InvalidRequestError(
                f"{masks_key!r}: expected Masks, got {type(masks).__name__}", field=str(masks_key)
            )
        return TokenLayout(log_probs, masks, padded)

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.log_probs.batch_size)

    @cached_property
    def lengths(self) -> Tensor:
        """int64[rows], on the CPU: the number of tokens in each row, in C order."""
        return self.columns.sum(-1).cpu() if self.padded else ragged(self.view(self.log_probs), ("own", "full")).lengths

    @cached_property
    def columns(self) -> Tensor:
        """bool[rows, width]: where tokens are in the dense tensor, or would be with ``pad_output=True``."""
        if not self.padded:
            names = {"prompt", "response", "full"} & set(self.log_probs.keys())
            parts = {name: ragged(self.view(self.log_probs), ("own", name)) for name in names}
            return dense_columns(Parts(parts.get("prompt"), parts.get("response"), parts["full"])).mask
        mask = None if self.masks is None else self.masks.all_attention_mask
        if not isinstance(mask, Tensor) or tuple(mask.shape[:-1]) != self.batch:
            found = list(mask.shape) if isinstance(mask, Tensor) else "no dense mask"
            raise InvalidRequestError(
                f"dense log-probs of shape {list(self.log_probs.full.shape)} need an attention mask of that shape, to "
                f"tell tokens from pads; got {found}",
                field="masks",
            )
        return as_mask(mask, "all_attention_mask").reshape(math.prod(self.batch), mask.shape[-1])

    # Reading ---------------------------------------------------------------------------------------------------------

    def view(self, container: Any) -> TensorDict:
        """Return a TensorDict with a container of these tokens, under `own`, and the masks of dense rows."""
        masks = container if isinstance(container, Masks) else self.masks
        return TensorDict({"own": container, **({} if masks is None else {"masks": masks})}, batch_size=())

    def read(self, container: Any, key: NestedKey) -> Tensor:
        """Return a field of a container of these tokens, which is at `key`, as flat values ``[total, ...]``.

        Raises:
            InvalidRequestError: the field is in another layout, or its rows have other lengths.
        """
        name = key_parts(key)[-1]
        if self.padded:
            return self.flat(getattr(container, name), key)
        found = ragged(self.view(container), ("own", name))
        must_have_lengths(found.lengths, self.lengths, str(key))
        return found.values

    def flat(self, dense: Any, key: NestedKey) -> Tensor:
        """Return the tokens of a dense tensor ``[*batch, width]``, for `WIDE` fields ``[*batch, width, k]``, flat."""
        wide = key_parts(key)[-1] in WIDE
        wanted = (*self.batch, self.columns.shape[-1])
        shape = tuple(dense.shape) if isinstance(dense, Tensor) else None
        if shape is None or (shape[:-1] if wide else shape) != wanted:
            expected = f"shape {[*wanted, 'k'] if wide else [*wanted]}, as wide as the masks"
            found = "no dense tensor" if shape is None else list(shape)
            raise InvalidRequestError(f"{key}: expected {expected}; got {found}", field=str(key))
        return dense.reshape(*self.columns.shape, *shape[len(wanted) :])[self.columns.to(dense.device)]

    def scored(self, log_probs: LogProbs, full: NestedKey) -> Tensor:
        """Return bool[total]: which tokens of the scoring at `full` have a log-prob: all without a `scored_mask`."""
        if "scored_mask" not in log_probs.keys():
            return torch.ones(int(self.lengths.sum()), dtype=torch.bool)
        key = _sibling(full, "scored_mask")
        found = as_mask(self.read(log_probs, key), str(key))
        if self.padded and int((dense := log_probs.scored_mask).sum()) != int(found.sum()):
            outside = (dense.reshape(self.columns.shape) & ~self.columns.to(dense.device)).any(-1)
            what = f"it is scored where the masks have a pad, {_OTHER_COLUMNS}"
            refuse(dict.fromkeys(outside.nonzero().flatten().tolist(), what), str(full))
        return found

    def selected(self, td: TensorDictBase, here: TensorDictBase, key: NestedKey) -> Tensor:
        """Return bool[total]: which positions the mask under `key` selects."""
        *path, name = key_parts(key)
        masks = find_entry(td, tuple(path), first=here)[0] if path else None
        if not isinstance(masks, Masks):
            return as_mask(self.flat(find_entry(td, key, first=here)[0], key), str(key))
        if name not in masks.keys():
            fields = ", ".join(sorted(set(masks.keys()) - {"padded"}))
            raise MissingKeyError(
                f"the masks have no field {name!r}, only {fields}; pass mask_key= to use another one, or count every "
                "scored token with assistant_only=False",
                field=str(key),
            )
        return as_mask(self.read(masks, key), str(key))

    # Computing and storing -------------------------------------------------------------------------------------------

    def ragged(self, values: Tensor) -> Ragged:
        return Ragged(values, self.lengths)

    def row_sums(self, values: Tensor) -> Tensor:
        """Return ``[*batch]``: the sum of each row of flat values."""
        index = self.ragged(values).row_index.to(values.device)
        return values.new_zeros(len(self.lengths)).index_add(0, index, values).reshape(self.batch)

    def first(self, mask: Tensor) -> Tensor:
        """Return int64[rows]: the first position of each row where `mask` is True; its length if there is none."""
        marks = self.ragged(mask.cpu())
        at = marks.values
        return self.lengths.scatter_reduce(0, marks.row_index[at], marks.positions[at], "amin")

    def not_finite(self, values: Tensor, mask: Tensor, name: Any) -> Problems:
        """Return, for each row with a NaN or an infinity where `mask` is True, the first of these `name`."""
        values = values.detach()
        first, starts = self.first(mask & ~torch.isfinite(values)), self.ragged(values).offsets
        return {
            row: f"{name} is {float(values[starts[row] + first[row]])} at position {int(first[row])}"
            for row in (first < self.lengths).nonzero().flatten().tolist()
        }

    def dense(self, values: Tensor) -> Tensor:
        """Return flat values as ``[*batch, width]``, with 0 at pads."""
        return self.ragged(values).scatter(self.columns, 0).reshape(*self.batch, self.columns.shape[-1])

    def stored(self, values: Tensor) -> Tensor | PerToken:
        """Return flat values in the layout of the tokens: a dense tensor, or a `PerToken` of rows. See `container`."""
        columns = Columns(self.columns, None) if self.padded else None
        made = container(PerToken, {"full": self.ragged(values)}, self.batch, columns=columns)
        return made.full if self.padded else made


class Pair(NamedTuple):
    """Two scorings of the same tokens, flat, row after row, on one device.

    Attributes:
        gen: float[total], the policy's log-probs; 0.0 where the mask is False.
        ref: float[total], the reference's log-probs; 0.0 where the mask is False.
        mask: bool[total], the positions that count: scored in both, and selected.
        layout: how the tokens are stored in the TensorDict.
    """

    gen: Tensor
    ref: Tensor
    mask: Tensor
    layout: TokenLayout


def read_pair(td: TensorDictBase, keys: PairKeys) -> Pair:
    """Read two scorings and the positions that count.

    Raises:
        MissingKeyError: a scoring or the mask is missing.
        InvalidRequestError: the scorings have different layouts, or a log-prob that counts is not finite; `rows` lists
            the rows at fault.
        ProvenanceMismatchError: the scorings are of different distributions and `allow_mismatch` is False.
    """
    gen, here = find_log_probs(td, keys.gen)
    ref, _ = find_log_probs(td, keys.ref)
    kinds = [f"batch {tuple(one.batch_size)}, {'dense' if is_dense(one) else 'one row a sample'}" for one in (gen, ref)]
    if kinds[0] != kinds[1]:
        raise InvalidRequestError(
            f"{keys.gen} and {keys.ref} have different layouts: {kinds[0]}; and {kinds[1]}; score both with the same "
            "batch and pad_output",
            field=str(keys.ref),
        )
    layout = TokenLayout.of(td, here, gen, keys.masks)
    if not keys.allow_mismatch:
        _check_labels(layout, keys, gen, ref)
    values, scored = layout.read(gen, keys.gen), layout.scored(gen, keys.gen)
    others, also = layout.read(ref, keys.ref).to(values.device), layout.scored(ref, keys.ref).to(values.device)
    scored = scored.to(values.device)
    if layout.padded and "scored_mask" in ref.keys():
        # Columns that are off by one may score no pad. They then score a row's first token, which has no log-prob
        # because no token precedes it.
        shifted = (layout.first(also & ~scored) == 0) & (layout.lengths > 0)
        what = f"it is scored at the first token, {_OTHER_COLUMNS}"
        refuse(dict.fromkeys(shifted.nonzero().flatten().tolist(), what), str(keys.ref))
    mask, selecting = scored & also, keys.selecting
    if selecting and keys.mask is None and layout.masks is not None and "all_response_mask" in layout.masks.keys():
        # The assistant's turns in a prompt are examples. Once they are scored, they would count as sampled.
        selecting.append((*key_parts(keys.masks), "all_response_mask"))
    for key in selecting:
        mask &= layout.selected(td, here, key).to(values.device)
    if not keys.allow_mismatch:
        _check_sets(layout, keys, gen, ref, mask)
    refuse(layout.not_finite(others, mask, keys.ref) | layout.not_finite(values, mask, keys.gen), "log-probs")
    # Nothing downstream sees what is stored where a position does not count, not even a caller's own estimator.
    return Pair(torch.where(mask, values, 0.0), torch.where(mask, others, 0.0), mask, layout)


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


def is_dense(container: LogProbs) -> bool:
    """Return whether the rows are one tensor. Dense rows of different widths are not; they are read row by row."""
    try:
        return container.padded is True and isinstance(container.full, Tensor)
    except InvalidRequestError:
        return False


def _sibling(full: NestedKey, name: str) -> NestedKey:
    return (*key_parts(full)[:-1], name)


# Distributions --------------------------------------------------------------------------------------------------------


def _check_labels(layout: TokenLayout, keys: PairKeys, gen: LogProbs, ref: LogProbs) -> None:
    """Raise if the scorings are of different distributions. Log-probs without a provenance are accepted."""
    count = len(layout.lengths)
    labels = zip(provenance_of_rows(gen, count), provenance_of_rows(ref, count), strict=True)
    for row, (one, other) in enumerate(labels):
        if one is None or other is None or one.matches(other):
            continue
        if "truncated" in (one.support, other.support):
            one = replace(one, support="full") if _keeps_all(layout, keys.gen, gen, row) else one
            other = replace(other, support="full") if _keeps_all(layout, keys.ref, ref, row) else other
            if one.matches(other):
                continue
        truncated = "truncated" in (one.support, other.support)
        how = "over the same ids (support_key=…)" if truncated else "with the same log_probs_mode"
        raise ProvenanceMismatchError(
            f"row {row}: {keys.gen} and {keys.ref} are of different distributions, so their difference has no meaning: "
            f"{_distribution(one)}; and {_distribution(other)}. Score both {how} and temperature, or pass "
            "allow_mismatch=True"
        )


def _keeps_all(layout: TokenLayout, full: NestedKey, log_probs: LogProbs, row: int) -> bool:
    """Return whether a scoring says that no id was left out at any token of a row."""
    if not carries_sets(log_probs):
        return False
    return not bool(layout.ragged(layout.read(log_probs, _sibling(full, COUNTS))).split()[row].any())


def _check_sets(layout: TokenLayout, keys: PairKeys, gen: LogProbs, ref: LogProbs, mask: Tensor) -> None:
    """Raise if two truncated scorings were normalised over different ids where the mask is True.

    Their labels do not say over which ids.
    """
    labels = zip(*(provenance_of_rows(each, len(layout.lengths)) for each in (gen, ref)), strict=True)
    cut = [all(one is not None and one.support == "truncated" for one in pair) for pair in labels]
    where = layout.ragged(mask.cpu())
    counts = where.values & torch.tensor(cut, dtype=torch.bool)[where.row_index]
    if not bool(counts.any()):
        return
    for full, log_probs in ((keys.gen, gen), (keys.ref, ref)):
        if not carries_sets(log_probs):
            raise ProvenanceMismatchError(
                f"row {int(where.row_index[counts][0])}: both scorings are of truncated support, and {full} does not "
                f"say which ids were left, so nothing shows that they are of one distribution; {_SUPPORT_ADVICE}"
            )
        layout.read(log_probs, _sibling(full, COUNTS))
    one, other = (token_sets(layout.view(log_probs), "own") for log_probs in (gen, ref))
    for at in (counts & ~one.same_as(other)).nonzero().flatten().tolist():
        raise ProvenanceMismatchError(
            f"row {int(where.row_index[at])}, position {int(where.positions[at])}: {keys.gen} and {keys.ref} were "
            f"normalised over different ids, so their difference has no meaning; {_SUPPORT_ADVICE}"
        )


def _distribution(one: Provenance) -> str:
    """Return what must agree in two provenances, for a message."""
    mode, temperature, support, penalties = one.distribution
    return ", ".join([f"{mode}, temperature {temperature:g}, {support} support", *(f"{n} {v:g}" for n, v in penalties)])
