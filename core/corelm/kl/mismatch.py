"""Train/inference mismatch: the sampler and the trainer score the same tokens at the same weights differently.

Engines round differently, so on-policy learning is slightly off-policy. `mismatch_report` measures the difference;
`ImportanceCorrection` computes weights that correct for it. The ratio is always ``exp(train − sampled)``, of a token
or, summed over the tokens that count, of a sequence. `staleness` says how old the weights are that sampled each token.

Sources: F. Yao, L. Liu et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025: truncated
ratios of tokens. IcePop (Ling team, 2025): masked tokens. J. Liu, Y. Li et al., When Speed Kills Stability, 2025:
ratios of sequences, truncated or masked; these account for the effect of earlier tokens on where later ones are drawn,
at a higher variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, TypedDict, Unpack, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm.containers.classes import PerToken
from corelm.containers.reading import TokenRows, key_parts, next_or_root, provenance_of_rows
from corelm.errors import InvalidRequestError, Problems, refuse
from corelm.kl.estimators import MAX_LOG_RATIO, k1
from corelm.kl.pairs import Pair, PairKeys, full_key, read_pair, rows_of, scores
from corelm.spec.version_runs import backward, counts_of, run_problems
from corelm.tensors.ragged import as_mask
from corelm.validate import as_list, checks_names, invalid, number, one_of, shown

Level = Literal["token", "sequence"]
Correction = Literal["truncate", "mask"]


class ImportanceCorrection(TensorDictModuleBase):
    """Write `importance_weights`, by which the loss of a token or a sequence is multiplied. They carry no gradient.

    The module reads and writes under ``next`` if the TensorDict has one, else at the root.

    Args:
        level: `token` writes one weight per token, in the layout of the log-probs, and 0.0 where a token does not
            count; rows of different lengths give a `PerToken`. `sequence` writes float32 ``[*batch]``, with 1.0 for a
            sequence without a token that counts.
        how: `truncate` clamps ratios to the bounds; `mask` gives ratios out of bounds the weight 0.0.
        low: the lower bound, ``0 <= low <= 1``; None means no bound.
        high: the upper bound, ``1 <= high``; None and inf mean no bound.
        log_probs_key: the sampler's log-probs: the key of a `LogProbs`, or of its field `full`.
        train_log_probs_key: the trainer's.
        weights_key: where the weights are written.

    The other arguments and the errors are those of `KLComputation`.
    """

    @checks_names()
    def __init__(
        self,
        level: Level = "token",
        how: Correction = "truncate",
        low: float | None = None,
        high: float | None = 2.0,
        *,
        assistant_only: bool = True,
        mask_key: NestedKey | None = None,
        allow_mismatch: bool = False,
        log_probs_key: NestedKey = ("log_probs", "full"),
        train_log_probs_key: NestedKey = ("train_log_probs", "full"),
        masks_key: NestedKey = "masks",
        weights_key: NestedKey = "importance_weights",
    ) -> None:
        super().__init__()
        one_of("level", level, get_args(Level))
        one_of("how", how, get_args(Correction))
        unbounded = high is None or (isinstance(high, float) and high == math.inf)
        lowest = 0.0 if low is None else number("low", low, 0.0, 1.0)
        self.bounds = lowest, math.inf if unbounded else number("high", high, 1.0)
        self.level, self.how = level, how
        self.weights_key = weights_key
        self.keys = PairKeys(log_probs_key, train_log_probs_key, masks_key, assistant_only, mask_key, allow_mismatch)
        self.in_keys = self.keys.read
        self.out_keys = [weights_key]

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        pair = read_pair(tensordict, self.keys)
        ratio = _ratios(_log_ratios(pair, self.level))
        low, high = self.bounds
        outside = (ratio < low) | (ratio > high)
        weights = ratio.clamp(low, high) if self.how == "truncate" else torch.where(outside, 0.0, ratio)
        if self.level == "token":
            weights = pair.rows.stored(torch.where(pair.mask, weights, 0.0))
        next_or_root(tensordict).set(self.weights_key, weights)
        return tensordict


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReport:
    """How far two scorings of the same tokens differ: ``d = train − sampled``, in nats, over the tokens that count.

    If no token counts, `mean_exp_abs` and `effective_share` are 1.0 and all other figures are 0.

    Attributes:
        tokens: how many tokens count.
        sequences: how many sequences have a token that counts.
        mean_abs: the mean of ``|d|``.
        mean_exp_abs: the mean of ``exp |d|``, with ``|d|`` clamped to 20 nats.
        max_abs: the largest ``|d|``.
        effective_sample_size: ``(Σ w)² / Σ w²`` of the ratios w (L. Kish, Survey Sampling, 1965).
        effective_share: `effective_sample_size` divided by the number of ratios: at most 1.
        clipped_share: the share of tokens, or of sequences, whose ratio is out of bounds.
    """

    tokens: int
    sequences: int
    mean_abs: float
    mean_exp_abs: float
    max_abs: float
    effective_sample_size: float
    effective_share: float
    clipped_share: float

    def to_dict(self) -> dict[str, float]:
        """Return the figures as plain numbers by name, for a logger."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens in {self.sequences} sequences: |Δ log p| mean {self.mean_abs:.2e}, "
            f"max {self.max_abs:.2e}, mean exp {self.mean_exp_abs:.6f}; effective sample size "
            f"{self.effective_sample_size:.1f} ({self.effective_share:.1%}); clipped {self.clipped_share:.2%}"
        )


class MismatchOptions(TypedDict, total=False):
    """The options of `mismatch_report`: those of `ImportanceCorrection` that say what is compared."""

    level: Level
    low: float | None
    high: float | None
    assistant_only: bool
    mask_key: NestedKey | None
    allow_mismatch: bool
    log_probs_key: NestedKey
    train_log_probs_key: NestedKey
    masks_key: NestedKey


@checks_names(ImportanceCorrection.__init__)
@torch.no_grad()
def mismatch_report(td: TensorDictBase, **options: Unpack[MismatchOptions]) -> MismatchReport:
    """Measure how far the sampler's and the trainer's log-probs in `td` differ.

    The options are `level`, `low`, `high`, `assistant_only`, `mask_key`, `allow_mismatch`, `log_probs_key`,
    `train_log_probs_key` and `masks_key`; these and the errors are those of `ImportanceCorrection`.
    """
    correction = ImportanceCorrection(how="truncate", weights_key="importance_weights", **options)
    return _report(read_pair(td, correction.keys), correction)


@checks_names(ImportanceCorrection.__init__)
@torch.no_grad()
def mismatch_by_version(td: TensorDictBase, **options: Unpack[MismatchOptions]) -> dict[str, MismatchReport]:
    """Return one `mismatch_report` for each version of the weights, by its label, of the tokens that it has sampled.

    With ``level="sequence"``, what one version has sampled of an answer counts as a sequence. The options are those of
    `mismatch_report`.

    Raises:
        InvalidRequestError: as for `mismatch_report`, and for rows whose weights are not known.
    """
    correction = ImportanceCorrection(how="truncate", weights_key="importance_weights", **options)
    keys, pair = correction.keys, read_pair(td, correction.keys)
    labels, index = _token_versions(pair.rows, keys.gen)
    places = index.to(pair.mask.device)
    parts = {label: pair._replace(mask=pair.mask & (places == place)) for place, label in enumerate(labels)}
    return {label: _report(part, correction) for label, part in parts.items() if bool(part.mask.any())}


def _report(pair: Pair, correction: ImportanceCorrection) -> MismatchReport:
    level, (low, high) = correction.level, correction.bounds
    distance = (pair.ref.double() - pair.gen.double())[pair.mask].abs()
    with_tokens = (pair.rows.row_sums(pair.mask.double()) > 0).flatten()
    log_ratio = _log_ratios(pair, level).flatten()[pair.mask if level == "token" else with_tokens].double()
    if not len(distance):
        zeros = dict.fromkeys(("mean_abs", "max_abs", "effective_sample_size", "clipped_share"), 0.0)
        return MismatchReport(tokens=0, sequences=0, mean_exp_abs=1.0, effective_share=1.0, **zeros)
    ratio = _ratios(log_ratio)
    # A common factor cancels out; without it the ratios of long sequences would overflow.
    scaled = (log_ratio - log_ratio.max()).exp()
    size = float(scaled.sum().square() / scaled.square().sum())
    return MismatchReport(
        tokens=len(distance),
        sequences=int(with_tokens.sum()),
        mean_abs=float(distance.mean()),
        mean_exp_abs=float(distance.clamp(max=MAX_LOG_RATIO).exp().mean()),
        max_abs=float(distance.max()),
        effective_sample_size=size,
        effective_share=size / len(log_ratio),
        clipped_share=float(((ratio < low) | (ratio > high)).double().mean()),
    )


def _log_ratios(pair: Pair, level: Level) -> Tensor:
    """Return ``train − sampled`` for each token, flat, or each sequence, ``[*batch]``; 0.0 where no token counts."""
    log_ratio = k1(pair.ref, pair.gen, pair.mask)
    return log_ratio if level == "token" else pair.rows.row_sums(log_ratio)


def _ratios(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# The age of the weights -----------------------------------------------------------------------------------------------


@checks_names()
def staleness(
    td: TensorDictBase,
    version: str,
    *,
    versions: Iterable[str] | None = None,
    log_probs_key: NestedKey = ("log_probs", "full"),
    masks_key: NestedKey = "masks",
) -> Tensor | PerToken:
    """Return by how many updates the weights that sampled each token are behind `version`.

    Labels that core makes count up, also with an adapter: ``"3+policy@12"`` is three updates behind ``"4+policy@14"``,
    one of the base weights and two of the adapter, and ``"step-10+2"`` two behind ``"step-10+4"``. Of other labels, say
    the order::

        age = corelm.staleness(td, backend.weight_version)              # "7"
        td["fresh"] = td["masks"].all_assistant_mask & (age <= 2)       # dense rows
        age = corelm.staleness(td, "step-20", versions=["init", "step-10", "step-20"])

    Args:
        td: what a policy returned.
        version: the label of the weights to compare with, usually those in force.
        versions: all labels, oldest first, for labels that do not count.
        log_probs_key: the sampler's log-probs: the key of a `LogProbs`, or of its field `full`.
        masks_key: the `Masks` that the policy wrote.

    Returns:
        int64, stored as the log-probs are; -1 at pads and at tokens without a log-prob, such as those of the prompt.

    Raises:
        MissingKeyError: there are no such log-probs.
        InvalidRequestError: labels do not count from the same one and are not among `versions`; weights are newer than
            `version` or go backwards within a row; the provenance of a row is not known. The message names row and
            position.
    """
    key = full_key(log_probs_key)
    rows, _ = rows_of(td, key, masks_key)
    labels, index = _token_versions(rows, key)
    order = None if versions is None else _order(versions)
    ages: list[int] = []
    for place, label in enumerate(labels):
        first = rows.first(index == place)
        found = (first < rows.lengths).nonzero().flatten().tolist()
        age = _age(label, version, order) if found else -1
        if isinstance(age, str):
            why = f"position {int(first[found[0]])}: {age}"
            raise InvalidRequestError(f"row {found[0]}, {why}", field="version", problems={found[0]: why})
        ages.append(age)
    return rows.stored(torch.tensor([*ages, -1])[index])


def _order(versions: Iterable[str]) -> dict[str, int]:
    labels = as_list(versions)
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise invalid("versions", f"expected a list of labels, oldest first, got {shown(versions)}")
    if len({*labels}) < len(labels):
        raise invalid("versions", "a label is there twice, so it says nothing about the order")
    return {label: place for place, label in enumerate(labels)}


def _age(label: str, version: str, order: dict[str, int] | None) -> int | str:
    """Return by how many updates a label is behind `version`, or why that is not known."""
    if label == version:
        return 0
    one, other = counts_of(label), counts_of(version)
    if order is not None:
        if missing := [each for each in (label, version) if each not in order]:
            return f"the weights {missing[0]!r} are not among versions"
        age = order[version] - order[label]
    elif one.adapter != other.adapter:
        return f"the weights {label!r} and {version!r} have other adapters; give the version of the same adapter"
    elif (one.base[0], one.own[0]) != (other.base[0], other.own[0]):
        return f"{label!r} and {version!r} count from other labels; give versions=[…], all labels, oldest first"
    else:
        age = other.base[1] - one.base[1] + other.own[1] - one.own[1]
    return age if age >= 0 else f"the weights {label!r} are newer than {shown(version)}"


def _token_versions(rows: TokenRows, key: NestedKey) -> tuple[list[str], Tensor]:
    """Return the labels of the weights that sampled tokens, and int64[total]: that of each token, -1 if not sampled."""
    lengths = rows.lengths.tolist()
    provenances = provenance_of_rows(rows.td.get(key_parts(key)[:-1]), len(lengths))
    answers, masks = None, rows.td.get(rows.masks, None)
    with_runs = any(one is not None and one.version_runs for one in provenances)
    if with_runs and masks is not None and "all_response_mask" in masks.keys():
        mask = rows.read((*key_parts(rows.masks), "all_response_mask")).values
        first = rows.first(as_mask(mask, str(rows.masks)))
        answers = torch.where(first < rows.lengths, first, 0).tolist()
    problems: Problems = {}
    labels: dict[str, int] = {}
    index = [torch.full((length,), -1) for length in lengths]
    for row, (one, length) in enumerate(zip(provenances, lengths, strict=True)):
        start = 0
        if one is None:
            problems[row] = "its provenance is not known, so neither are its weights"
            continue
        if one.version_runs:
            if answers is None:
                problems[row] = "is of several weights, and without masks it is not known where its answer begins"
                continue
            start = answers[row]
            if why := run_problems(one.version_runs, length - start) or backward(one.version_runs):
                problems[row] = f"version_runs: {why}"
                continue
        for version, begin in one.version_runs or ((one.weight_version, 0),):
            index[row][start + begin :] = labels.setdefault(version, len(labels))
    refuse(problems, str(key))
    flat = torch.cat(index) if index else torch.empty(0, dtype=torch.int64)
    return list(labels), torch.where(scores(rows, key)[1].cpu(), flat, -1)
