"""Train/inference mismatch: the sampler's log-probs and the trainer's of the same tokens at the same weights.

Engines round differently, so what is sampled from is not quite what is trained, and on-policy learning is a little
off-policy. `mismatch_report` says by how much, `ImportanceCorrection` gives the weights that correct for it. The ratio
is always ``exp(train − sampled)``, of a token or, summed over the tokens that count, of a sequence.

Sources: F. Yao, L. Liu et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025
(fengyao.notion.site/off-policy-rl): truncated ratios of tokens. IcePop (Ling team, 2025): tokens whose ratio is out of
bounds on either side are masked. J. Liu, Y. Li et al., When Speed Kills Stability, 2025
(richardli.xyz/post/rl-collapse-training-inference): ratios of whole sequences, truncated or masked; unlike those of
tokens they also know that earlier tokens change where later ones are drawn, at a higher variance.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm.kl.estimators import MAX_LOG_RATIO, k1
from corelm.kl.layout import place
from corelm.kl.pairs import Pair, PairKeys, read_pair
from corelm.validate import invalid, one_of

Level = Literal["token", "sequence"]
Cut = Literal["truncate", "mask"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which ratios are taken as they are: ``low <= ratio <= high``; None is no bound. `level`: ratios of what."""

    level: Level
    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        one_of("level", self.level, get_args(Level))
        low, high = self.edges
        if not 0 <= low <= 1 <= high:
            raise invalid("high" if 0 <= low <= 1 else "low", f"expected 0 <= low <= 1 <= high, got {low} and {high}")

    @property
    def edges(self) -> tuple[float, float]:
        return self.low or 0.0, math.inf if self.high is None else self.high

    def outside(self, ratio: Tensor) -> Tensor:
        """bool"""
        low, high = self.edges
        return (ratio < low) | (ratio > high)


class ImportanceCorrection(TensorDictModuleBase):
    """Writes `importance_weights`, to multiply a token's or a sequence's loss by. They carry no gradient.

    It acts on ``("next", …)`` if there is one, else on the TensorDict itself.

    Args:
        level: `token`: a weight for each, in the layout of the log-probs, 0.0 where a token does not count; rows of
            their own length give a `PerToken`. `sequence`: float32 ``[*batch]``; 1.0 of no tokens.
        how: `truncate` cuts ratios to the bounds; `mask` gives those outside the weight 0.0.
        low, high: the bounds, ``0 <= low <= 1 <= high``; None is no bound.
        log_probs_key: the sampler's, the field `full` of a `LogProbs`.
        train_log_probs_key: the trainer's.
        assistant_only, mask_key, masks_key, allow_mismatch: as in `KLComputation`.
        weights_key: the result.

    Raises:
        InvalidRequestError, MissingKeyError, ProvenanceMismatchError: as in `KLComputation`.
    """

    def __init__(
        self,
        level: Level = "token",
        how: Cut = "truncate",
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
        one_of("how", how, get_args(Cut))
        self.bounds = Bounds(level, low, high)
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
            place(tensordict).set(self.weights_key, pair.layout.stored(torch.where(pair.mask, weights, 0.0)))
        else:
            place(tensordict).set(self.weights_key, weights)
        return tensordict


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReport:
    """How far two scorings of the same tokens are apart. ``d = train − sampled``, in nats, over the tokens that count.

    Attributes:
        tokens, sequences: how many count; a sequence does if one of its tokens does.
        mean_abs, mean_exp_abs, max_abs: the means of ``|d|`` and ``exp |d|`` (of no more than 20 nats), and the
            largest ``|d|``.
        effective_sample_size: ``(Σ w)² / Σ w²`` of the ratios w, which is the number of them if they are all equal
            (L. Kish, Survey Sampling, 1965).
        effective_share: the same, per ratio: at most 1.
        clipped_share: of tokens, or of sequences, whose ratio is out of bounds.

    Of no tokens `mean_exp_abs` and `effective_share` are 1.0 and the others 0.0.
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
        """Plain numbers by name, for a logger."""
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
    """What the log-probs in `td` show. The arguments are those of `ImportanceCorrection`, and so are the errors."""
    bounds = Bounds(level, low, high)
    keys = PairKeys.selecting(log_probs_key, train_log_probs_key, masks_key, assistant_only, mask_key)
    pair = read_pair(td, keys, allow_mismatch=allow_mismatch)
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
    # A common factor changes nothing, and without one the ratios of long sequences are beyond any float.
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
    """At least float32 ``train − sampled``: flat, one a token, or ``[*batch]``. 0.0 where nothing counts."""
    log_ratio = k1(pair.ref, pair.gen, pair.mask)
    return log_ratio if level == "token" else pair.layout.row_sums(log_ratio)


def _ratios(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
