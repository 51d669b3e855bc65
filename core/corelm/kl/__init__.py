"""KL between a policy and a reference, and the mismatch between sampler and trainer.

The functions (`estimators.py`) take tensors. The TensorDict modules (`transforms.py`, `mismatch.py`) take containers:
dense or one row per sample, at the root or under ``next``, from any engine.

What NaN and infinity mean is the same everywhere in this package:

- **Where a position does not count**, values and gradients ignore them. Estimators that you pass to `KLComputation` get
  0.0 there.
- **Functions** never turn them into a finite number. NaN gives NaN, and so does what no log-prob of a sampled token can
  be: `gen` that is ±inf, `ref` that is +inf. ``ref = −inf`` is legal: the estimate is +inf (`k3`, `k3_st`: `MAX_K3`).
  Logits of which one is NaN or +inf, or all are −inf, are no distribution: `exact` and `top_k` give NaN.
  `top_k_divergence` gives NaN for NaN, and refuses probabilities that do not sum to 1.
- **Modules**, `mismatch_report` included, refuse them with an `InvalidRequestError` that names the row and the
  position: in log-probs, ±inf included, and in the KL that an estimator returns. They then write nothing. A
  reward that is NaN is refused with its row; one that is infinite stays so.
- **Coefficients, targets, horizons and bounds** are finite numbers; an upper bound may be inf, which is no bound.
"""

from corelm.containers.classes import PerToken
from corelm.kl.distillation import DistillationLoss
from corelm.kl.divergences import (
    DIVERGENCES,
    Divergence,
    OutputHead,
    TopLogProbs,
    exact_divergence,
    js_upper_bound,
    top_k_divergence,
)
from corelm.kl.estimators import abs_kl, aggregate, exact, k1, k1_st, k2, k3, k3_st, top_k
from corelm.kl.mismatch import ImportanceCorrection, MismatchReport, mismatch_by_version, mismatch_report, staleness
from corelm.kl.transforms import (
    AdaptiveKLController,
    BiasedKLWarning,
    FixedKLController,
    KLComputation,
    KLController,
    KLRewardTransform,
    RetrieveKL,
    RetrieveLogProb,
)

__all__ = [
    "DIVERGENCES",
    "AdaptiveKLController",
    "BiasedKLWarning",
    "DistillationLoss",
    "Divergence",
    "FixedKLController",
    "ImportanceCorrection",
    "KLComputation",
    "KLController",
    "KLRewardTransform",
    "MismatchReport",
    "OutputHead",
    "PerToken",
    "RetrieveKL",
    "RetrieveLogProb",
    "TopLogProbs",
    "abs_kl",
    "aggregate",
    "exact",
    "exact_divergence",
    "js_upper_bound",
    "k1",
    "k1_st",
    "k2",
    "k3",
    "k3_st",
    "mismatch_by_version",
    "mismatch_report",
    "staleness",
    "top_k",
    "top_k_divergence",
]
