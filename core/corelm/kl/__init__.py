"""KL between a policy and a reference, and the mismatch between sampler and trainer.

The functions (`estimators.py`) take tensors. The TensorDict modules (`penalty.py`, `retrieve.py`, `mismatch.py`) take
containers: dense or one row per sample, at the root or under ``next``, from any engine.

What NaN and infinity mean is the same everywhere in this package:

- **Where a position does not count**, values and gradients ignore them. Estimators that you pass to `KLComputation` get
  0.0 at such positions.
- **Functions** pass them on and never turn them into a finite number. NaN gives NaN. A sampled token cannot have
  probability 0 under the policy that sampled it, and no log-prob is +inf, so these give NaN as well: `gen` that is
  ±inf, `ref` that is +inf. ``ref = −inf`` is legal, and the estimate is +inf (`k3`, `k3_st`: their limit `MAX_K3`).
  Logits of which one is NaN or +inf, or all are −inf, are no distribution: `exact` and `top_k` give NaN.
  `top_k_divergence` gives NaN for NaN, and refuses probabilities that do not sum to 1. `aggregate` gives what the sum
  of its values gives.
- **Modules**, `mismatch_report` included, refuse them with an `InvalidRequestError` that names the row and the
  position: in log-probs, ±inf included, and in the KL that an estimator returns. They then write no KL, no weights and
  no reward. The reward that they read is not checked: NaN stays NaN.
- **Coefficients, targets, horizons and bounds** are finite numbers; an upper bound may be inf, which is no bound.
  `AdaptiveKLController` refuses a measured KL that is not finite, and `FixedKLController` ignores every measured KL.
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
from corelm.kl.penalty import AdaptiveKLController, BiasedKLWarning, FixedKLController, KLComputation, KLController
from corelm.kl.retrieve import KLRewardTransform, RetrieveKL, RetrieveLogProb

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
