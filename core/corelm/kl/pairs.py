"""Read two scorings of the same tokens from a TensorDict as flat, aligned values.

A position counts if both scorings scored it and the mask selects it. Rows with different layouts, log-probs of
different distributions and log-probs that are not finite raise errors that name the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from corelm.containers.classes import LogProbs, Masks
from corelm.containers.fields import rows
from corelm.containers.keys import find_entry, key_parts
from corelm.containers.reading import ragged
from corelm.errors import InvalidRequestError, MissingKeyError, Problems, ProvenanceMismatchError, refuse
from corelm.kl.layout import TokenLayout
from corelm.kl.supports import check_supports, distribution_of
from corelm.spec.provenance import Provenance
from corelm.tensors.ragged import Ragged


@dataclass(frozen=True, slots=True)
class PairKeys:
    """The keys of two scorings, and of the mask that selects which positions count.

    Attributes:
        gen: the field `full` of the policy's `LogProbs`.
        ref: the field `full` of the reference's `LogProbs`.
        masks: the `Masks` that the policy wrote.
        mask: bool, shaped like ``tokens.full``: a field of a `Masks`, or a dense tensor. None selects every token.
        in_response: whether only tokens of the response count, where `masks` says which these are.
    """

    gen: NestedKey
    ref: NestedKey
    masks: NestedKey
    mask: NestedKey | None
    in_response: bool = False

    def __post_init__(self) -> None:
        for key in (self.gen, self.ref):
            if len(key_parts(key)) < 2 or key_parts(key)[-1] != "full":
                raise InvalidRequestError(f"{key!r}: expected a key such as ('log_probs', 'full')", field=str(key))

    @staticmethod
    def selecting(
        gen: NestedKey, ref: NestedKey, masks: NestedKey, assistant_only: bool, mask: NestedKey | None
    ) -> PairKeys:
        """Return the keys; without `mask`, `assistant_only` selects the assistant's tokens in the response."""
        if mask is None and assistant_only:
            return PairKeys(gen, ref, masks, (*key_parts(masks), "all_assistant_mask"), in_response=True)
        return PairKeys(gen, ref, masks, mask)

    @property
    def read(self) -> list[NestedKey]:
        return [self.gen, self.ref, *([] if self.mask is None else [self.mask])]


@dataclass(frozen=True, eq=False)
class Pair:
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

    def selected(self, mask: Tensor) -> Pair:
        """Return the pair with only those positions that bool[total] selects as well."""
        mask = self.mask & mask
        return Pair(torch.where(mask, self.gen, 0.0), torch.where(mask, self.ref, 0.0), mask, self.layout)


def read_pair(td: TensorDictBase, keys: PairKeys, *, allow_mismatch: bool) -> Pair:
    """Read two scorings and the positions that count.

    Raises:
        MissingKeyError: a scoring or the mask is missing.
        InvalidRequestError: the scorings have different layouts, or a log-prob that counts is not finite; `rows` lists
            the rows at fault.
        ProvenanceMismatchError: the scorings are of different distributions and `allow_mismatch` is False. Two of
            truncated support are of one distribution only if both say over which ids they were normalised, and these
            are the same at every position that counts.
    """
    gen, here = _find_log_probs(td, keys.gen)
    ref, _ = _find_log_probs(td, keys.ref)
    view = _scorings_with_masks(td, here, keys, gen=gen, ref=ref)
    if tuple(gen.batch_size) != tuple(ref.batch_size):
        raise _layout_error(keys, f"batches {tuple(gen.batch_size)} and {tuple(ref.batch_size)}")
    if not allow_mismatch:
        _check_distributions(gen, ref, keys)
    layout = _read_layout(view, gen)
    if layout.padded != _is_dense(ref):
        kinds = {True: "dense", False: "one row per sample"}
        raise _layout_error(
            keys, f"{kinds[layout.padded]} and {kinds[not layout.padded]}; score with the same pad_output"
        )
    gen_values, gen_scored = _read_values(view, "gen", gen, keys.gen, layout)
    ref_values, ref_scored = _read_values(view, "ref", ref, keys.ref, layout)
    refuse(_length_problems(gen_values.lengths, ref_values.lengths, keys.gen, keys.ref), str(keys.ref))
    if layout.padded and "scored_mask" in ref.keys():
        _check_shift(gen_scored, ref_scored, keys.ref, layout)
    device = gen_values.values.device
    mask = gen_scored.to(device) & ref_scored.to(device)
    if keys.mask is not None:
        mask &= _read_selection(td, here, view, keys.mask, keys.gen, layout).to(device)
    own = find_entry(td, keys.masks, first=here)[0] if keys.in_response else None
    if isinstance(own, Masks) and "all_response_mask" in own.keys():
        # The assistant's turns in a prompt are examples. Once they are scored, they would count as sampled.
        response = (*key_parts(keys.masks), "all_response_mask")
        mask &= _read_selection(td, here, view, response, keys.gen, layout).to(device)
    if not allow_mismatch:
        check_supports(view, {"gen": keys.gen, "ref": keys.ref}, mask, layout)
    values, others = gen_values.values, ref_values.values.to(device)
    refuse(layout.not_finite(others, mask, keys.ref) | layout.not_finite(values, mask, keys.gen), "log-probs")
    # Nothing downstream sees what is stored where a position does not count, not even a caller's own estimator.
    return Pair(torch.where(mask, values, 0.0), torch.where(mask, others, 0.0), mask, layout)


@dataclass(frozen=True, eq=False)
class Scoring:
    """One scoring, flat, row after row.

    Attributes:
        log_probs: the container.
        scored: bool[total]: which tokens have a log-prob.
        answers: int64[rows]: where the response of each row begins; None if that is not known.
        layout: how the tokens are stored in the TensorDict.
    """

    log_probs: LogProbs
    scored: Tensor
    answers: Tensor | None
    layout: TokenLayout


def read_scoring(td: TensorDictBase, key: NestedKey, masks_key: NestedKey) -> Scoring:
    """Read which tokens of a scoring have a log-prob, and where responses begin.

    Raises:
        MissingKeyError, InvalidRequestError: as for `read_pair`.
    """
    keys = PairKeys(key, key, masks_key, None)
    gen, here = _find_log_probs(td, key)
    view = _scorings_with_masks(td, here, keys, gen=gen)
    layout = _read_layout(view, gen)
    _, scored = _read_values(view, "gen", gen, key, layout)
    masks = view["masks"] if "masks" in view.keys() else None
    answers = None
    if masks is not None and "all_response_mask" in masks.keys():
        in_answer = ragged(
            TensorDict({"own": masks}, batch_size=td.batch_size), ("own", "all_response_mask"), masks="own"
        )
        answers = _first(in_answer.to("cpu"))
    return Scoring(gen, scored.cpu(), answers, layout)


def _first(marks: Ragged) -> Tensor:
    """Return int64[rows]: the first position of each row that is marked; 0 for a row without one."""
    starts = torch.zeros(len(marks), dtype=torch.int64)
    at = marks.values.nonzero().flatten().flip(0)
    starts[marks.row_index[at]] = marks.positions[at]
    return starts


def _find_log_probs(td: TensorDictBase, key: NestedKey) -> tuple[LogProbs, TensorDictBase]:
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


def _scorings_with_masks(td: TensorDictBase, here: TensorDictBase, keys: PairKeys, **scorings: LogProbs) -> TensorDict:
    """Return one TensorDict of both scorings and of the masks that belong to the first."""
    gen = scorings["gen"]
    view = TensorDict(dict(scorings), batch_size=td.batch_size)
    try:
        masks, _ = find_entry(td, keys.masks, first=here)
    except MissingKeyError:
        if not _is_dense(gen):
            return view
        # The caller built the log-probs; without masks they have no pads.
        masks = Masks(all_attention_mask=torch.ones_like(gen.full, dtype=torch.bool), batch_size=gen.batch_size)
    if not isinstance(masks, Masks):
        raise InvalidRequestError(f"{keys.masks!r}: expected Masks, got {type(masks).__name__}", field=str(keys.masks))
    view["masks"] = masks
    return view


def _is_dense(container: LogProbs) -> bool:
    """Return whether the rows are one tensor. Dense rows of different widths are not; they are read row by row."""
    try:
        return container.padded is True and isinstance(container.full, Tensor)
    except InvalidRequestError:
        return False


def _read_layout(view: TensorDict, gen: LogProbs) -> TokenLayout:
    batch = tuple(gen.batch_size)
    if _is_dense(gen):
        mask = view["masks"].all_attention_mask
        if not isinstance(mask, Tensor) or tuple(mask.shape[:-1]) != batch:
            found = list(mask.shape) if isinstance(mask, Tensor) else "no dense mask"
            raise InvalidRequestError(
                f"dense log-probs of shape {list(gen.full.shape)} need an attention mask of that shape, to tell tokens "
                f"from pads; got {found}",
                field="masks",
            )
        columns = _bool(mask.reshape(math.prod(batch), mask.shape[-1]), "all_attention_mask")
        return TokenLayout(batch, columns.sum(-1).cpu(), True, lambda: columns)
    lengths = ragged(view, ("gen", "full")).lengths

    def find_columns() -> Tensor:
        if "prompt" not in gen.keys() or "response" not in gen.keys():
            return Ragged.full(lengths, True, torch.bool).mask("right")
        return torch.cat([ragged(view, ("gen", "prompt")).mask("left"), ragged(view, ("gen", "response")).mask()], -1)

    return TokenLayout(batch, lengths, False, find_columns)


def _read_values(
    view: TensorDict, name: str, container: LogProbs, key: NestedKey, layout: TokenLayout
) -> tuple[Ragged, Tensor]:
    """Return the log-probs, and bool[total]: which are scored. Without a `scored_mask` all are."""
    has_mask = "scored_mask" in container.keys()
    if not layout.padded:
        values = ragged(view, (name, "full"))
        marks = ragged(view, (name, "scored_mask")) if has_mask else Ragged.full(values.lengths, True, torch.bool)
        refuse(_length_problems(values.lengths, marks.lengths, key, "its scored_mask"), str(key))
        return values, _bool(marks.values, f"scored_mask of {key}")
    values = layout.ragged(layout.flat(container.full, key))
    if not has_mask:
        return values, torch.ones_like(values.values, dtype=torch.bool)
    dense = container.scored_mask
    scored = _bool(layout.flat(dense, key), f"scored_mask of {key}")
    if int(dense.sum()) != int(scored.sum()):
        _check_columns(dense, key, layout)
    return values, scored


def _read_selection(
    td: TensorDictBase, here: TensorDictBase, view: TensorDict, key: NestedKey, gen: NestedKey, layout: TokenLayout
) -> Tensor:
    """Return bool[total]: which positions the mask under `key` selects."""
    *path, name = key_parts(key)
    container = find_entry(td, tuple(path), first=here)[0] if path else None
    if isinstance(container, Masks) and name not in container.keys():
        fields = ", ".join(sorted(set(container.keys()) - {"padded"}))
        raise MissingKeyError(
            f"the masks have no field {name!r}, only {fields}; pass mask_key= to use another one, or count every "
            "scored token with assistant_only=False",
            field=str(key),
        )
    if isinstance(container, Masks) and not layout.padded:
        selected = ragged(TensorDict({"own": container}, batch_size=td.batch_size), ("own", name), masks="own")
        refuse(_length_problems(selected.lengths, layout.lengths, key, gen), str(key))
        return _bool(selected.values, key)
    mask = getattr(container, name) if isinstance(container, Masks) else find_entry(td, key, first=here)[0]
    return _bool(layout.flat(mask, key), key)


def _bool(mask: Tensor, key: Any) -> Tensor:
    """Return a mask as bool. transformers writes zeros and ones; a mask of floats may hold NaN, which would count."""
    if mask.dtype.is_floating_point:
        raise InvalidRequestError(f"{key}: expected bool, got {mask.dtype}", field=str(key))
    return mask.to(torch.bool)


# Checks --------------------------------------------------------------------------------------------------------------


def _length_problems(first: Tensor, second: Tensor, one: Any, other: Any) -> Problems:
    if first.shape != second.shape:
        raise InvalidRequestError(f"{one} has {len(first)} rows and {other} {len(second)}", field=str(other))
    return {
        row: f"{one} has {int(first[row])} tokens and {other} {int(second[row])}"
        for row in (first != second).nonzero().flatten().tolist()
    }


def _check_columns(scored: Tensor, key: NestedKey, layout: TokenLayout) -> None:
    """Raise if a dense scoring scored a position where the masks have a pad: its columns are not those of the masks."""
    outside = (scored.reshape(layout.columns.shape) & ~layout.columns.to(scored.device)).any(-1)
    what = (
        f"{key} is scored where the masks have a pad, so it was made from a batch with other columns; score the "
        "tokens of this batch, id for id"
    )
    refuse(dict.fromkeys(outside.nonzero().flatten().tolist(), what), str(key))


def _check_shift(gen: Tensor, ref: Tensor, key: NestedKey, layout: TokenLayout) -> None:
    """Raise if only the reference scored a row's first token: its columns are shifted against those of the masks.

    Columns that are off by one may score no pad; they then score a row's first token, which has no log-prob because no
    token precedes it.
    """
    marks = layout.ragged((ref & ~gen.to(ref.device)).cpu())
    first = marks.row_index[marks.values & (marks.positions == 0)]
    what = (
        f"{key} is scored at the first token, so its columns are shifted relative to those of the masks; score the "
        "tokens of this batch, id for id"
    )
    refuse(dict.fromkeys(first.tolist(), what), str(key))


def _check_distributions(gen: LogProbs, ref: LogProbs, keys: PairKeys) -> None:
    """Raise if the scorings are of different distributions. Log-probs without a provenance are accepted."""
    kinds = {one.distribution for container in (gen, ref) for one in _provenances(container)}
    if len(kinds) < 2:
        return
    for row, (one, other) in enumerate(zip(rows(gen), rows(ref), strict=True)):
        a, b = distribution_of(one), distribution_of(other)
        if a is not None and b is not None and not a.matches(b):
            truncated = "truncated" in (a.support, b.support)
            how = "over the same ids (support_key=…)" if truncated else "with the same log_probs_mode"
            raise ProvenanceMismatchError(
                f"row {row}: {keys.gen} and {keys.ref} are of different distributions, so their difference has no "
                f"meaning: {_in_words(a)}; and {_in_words(b)}. Score both {how} and temperature, or pass "
                "allow_mismatch=True"
            )


def _in_words(one: Provenance) -> str:
    """Return what must agree in two provenances, for a message."""
    mode, temperature, support, penalties = one.distribution
    return ", ".join([f"{mode}, temperature {temperature:g}, {support} support", *(f"{n} {v:g}" for n, v in penalties)])


def _provenances(container: LogProbs) -> tuple[Any, ...]:
    found = container.provenance
    return () if found is None else found if isinstance(found, tuple) else (found,)


def _layout_error(keys: PairKeys, how: str) -> InvalidRequestError:
    return InvalidRequestError(f"{keys.gen} and {keys.ref} have different layouts: {how}", field=str(keys.ref))
