"""Train/inference mismatch: the sampler and the trainer score the same tokens at the same weights differently.

Engines round differently, so the sampled distribution is not exactly the trained one, and on-policy learning is
slightly off-policy. `mismatch_report` measures the difference; `ImportanceCorrection` computes weights that correct for
it. The ratio is always ``exp(train − sampled)``, of a token or, summed over the tokens that count, of a sequence.

Sources: F. Yao, L. Liu et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025
(fengyao.notion.site/off-policy-rl): truncated ratios of tokens. IcePop (Ling team, 2025): tokens whose ratio is out of
bounds on either side are masked. J. Liu, Y. Li et al., When Speed Kills Stability, 2025
(richardli.xyz/post/rl-collapse-training-inference): ratios of whole sequences, truncated or masked; unlike token
ratios, they account for the effect of earlier tokens on where later ones are drawn, at a higher variance.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm.containers.keys import next_or_root
from corelm.kl.estimators import MAX_LOG_RATIO, k1
from corelm.kl.pairs import Pair, PairKeys, read_pair
from corelm.kl.staleness import token_versions
from corelm.validate import number, one_of

Level = Literal["token", "sequence"]
Correction = Literal["truncate", "mask"]


@dataclass(frozen=True, slots=True)
class RatioBounds:
    """The range in which importance ratios are used unchanged: ``low <= ratio <= high``.

    Attributes:
        level: whether the ratios are those of tokens or of sequences.
        low: the lower bound, from 0 to 1; None means no bound.
        high: the upper bound, at least 1; None and inf mean no bound.
    """

    level: Level
    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        one_of("level", self.level, get_args(Level))
        if self.low is not None:
            object.__setattr__(self, "low", number("low", self.low, 0.0, 1.0))
        if self.high is not None and not (isinstance(self.high, float) and self.high == math.inf):
            object.__setattr__(self, "high", number("high", self.high, 1.0))

    @property
    def edges(self) -> tuple[float, float]:
        return 0.0 if self.low is None else self.low, math.inf if self.high is None else self.high

    def outside(self, ratio: Tensor) -> Tensor:
        """Return which ratios are out of bounds: bool, of the same shape."""
        low, high = self.edges
        return (ratio < low) | (ratio > high)


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
        assistant_only: as in `KLComputation`.
        mask_key: as in `KLComputation`.
        allow_mismatch: as in `KLComputation`.
        log_probs_key: the sampler's log-probs, the field `full` of a `LogProbs`.
        train_log_probs_key: the trainer's log-probs, the field `full` of a `LogProbs`.
        masks_key: as in `KLComputation`.
        weights_key: where the weights are written.

    Raises:
        InvalidRequestError, MissingKeyError, ProvenanceMismatchError: as in `KLComputation`.
    """

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
        one_of("how", how, get_args(Correction))
        self.bounds = RatioBounds(level, low, high)
        self.how = how
        self.allow_mismatch = allow_mismatch
        self.weights_key = weights_key
        self.keys = PairKeys.selecting(log_probs_key, train_log_probs_key, masks_key, assistant_only, mask_key)
        self.in_keys = self.keys.read
        self.out_keys = [weights_key]

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        pair = read_pair(tensordict, self.keys, allow_mismatch=self.allow_mismatch)
        ratio = _ratios(_log_ratios(pair, self.bounds.level))
        if self.how == "truncate":
            weights = ratio.clamp(*self.bounds.edges)
        else:
            weights = torch.where(self.bounds.outside(ratio), 0.0, ratio)
        if self.bounds.level == "token":
            next_or_root(tensordict).set(self.weights_key, pair.layout.stored(torch.where(pair.mask, weights, 0.0)))
        else:
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
        effective_sample_size: ``(Σ w)² / Σ w²`` of the ratios w, which is their number if all are equal (L. Kish,
            Survey Sampling, 1965).
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


@torch.no_grad()
def mismatch_report(
    td: TensorDictBase,
    *,
    level: Level = "token",
    low: float | None = None,
    high: float | None = 2.0,
    assistant_only: bool = True,
    mask_key: NestedKey | None = None,
    allow_mismatch: bool = False,
    log_probs_key: NestedKey = ("log_probs", "full"),
    train_log_probs_key: NestedKey = ("train_log_probs", "full"),
    masks_key: NestedKey = "masks",
) -> MismatchReport:
    """Measure how far the sampler's and the trainer's log-probs in `td` differ.

    The arguments, other than `td`, and the errors are those of `ImportanceCorrection`.
    """
    bounds = RatioBounds(level, low, high)
    keys = PairKeys.selecting(log_probs_key, train_log_probs_key, masks_key, assistant_only, mask_key)
    return _report(read_pair(td, keys, allow_mismatch=allow_mismatch), bounds)


@torch.no_grad()
def mismatch_by_version(
    td: TensorDictBase,
    *,
    level: Level = "token",
    low: float | None = None,
    high: float | None = 2.0,
    assistant_only: bool = True,
    mask_key: NestedKey | None = None,
    allow_mismatch: bool = False,
    log_probs_key: NestedKey = ("log_probs", "full"),
    train_log_probs_key: NestedKey = ("train_log_probs", "full"),
    masks_key: NestedKey = "masks",
) -> dict[str, MismatchReport]:
    """Return one `mismatch_report` for each version of the weights, by its label, of the tokens that it has sampled.

    An answer during which weights were updated has tokens of several versions. With ``level="sequence"``, what one
    version has sampled of an answer counts as a sequence. The arguments are those of `mismatch_report`.

    Raises:
        InvalidRequestError: as for `mismatch_report`, and for rows whose weights are not known.
    """
    bounds = RatioBounds(level, low, high)
    keys = PairKeys.selecting(log_probs_key, train_log_probs_key, masks_key, assistant_only, mask_key)
    pair = read_pair(td, keys, allow_mismatch=allow_mismatch)
    versions = token_versions(td, log_probs_key, masks_key)
    index = versions.index.to(pair.mask.device)
    parts = {label: pair.selected(index == place) for place, label in enumerate(versions.labels)}
    return {label: _report(part, bounds) for label, part in parts.items() if bool(part.mask.any())}


def _report(pair: Pair, bounds: RatioBounds) -> MismatchReport:
    level = bounds.level
    distance = (pair.ref.double() - pair.gen.double())[pair.mask].abs()
    with_tokens = (pair.layout.row_sums(pair.mask.double()) > 0).flatten()
    log_ratio = _log_ratios(pair, level).flatten()[pair.mask if level == "token" else with_tokens].double()
    if not len(distance):
        return MismatchReport(
            tokens=0,
            sequences=0,
            mean_abs=0.0,
            mean_exp_abs=1.0,
            max_abs=0.0,
            effective_sample_size=0.0,
            effective_share=1.0,
            clipped_share=0.0,
        )
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
        clipped_share=float(bounds.outside(_ratios(log_ratio)).double().mean()),
    )


def _log_ratios(pair: Pair, level: Level) -> Tensor:
    """Return ``train − sampled``, at least float32: one per token, flat, or one per sequence, ``[*batch]``.

    It is 0.0 where a token does not count, and for a sequence without a token that counts.
    """
    log_ratio = k1(pair.ref, pair.gen, pair.mask)
    return log_ratio if level == "token" else pair.layout.row_sums(log_ratio)


def _ratios(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
