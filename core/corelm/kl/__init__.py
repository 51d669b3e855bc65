"""KL between a policy and a reference, and the mismatch between sampler and trainer.

The functions (`estimators.py`) take tensors. The TensorDict modules (`penalty.py`, `retrieve.py`, `mismatch.py`) take
containers: dense or one row per sample, at the root or under ``next``, from any engine.
"""

from corelm.containers.classes import PerToken
from corelm.kl.controllers import AdaptiveKLController, FixedKLController, KLController
from corelm.kl.estimators import abs_kl, aggregate, exact, k1, k1_st, k2, k3, k3_st, top_k
from corelm.kl.mismatch import ImportanceCorrection, MismatchReport, mismatch_report
from corelm.kl.penalty import BiasedKLWarning, KLComputation
from corelm.kl.retrieve import KLRewardTransform, RetrieveKL, RetrieveLogProb

__all__ = [
    "AdaptiveKLController",
    "BiasedKLWarning",
    "FixedKLController",
    "ImportanceCorrection",
    "KLComputation",
    "KLController",
    "KLRewardTransform",
    "MismatchReport",
    "PerToken",
    "RetrieveKL",
    "RetrieveLogProb",
    "abs_kl",
    "aggregate",
    "exact",
    "k1",
    "k1_st",
    "k2",
    "k3",
    "k3_st",
    "mismatch_report",
    "top_k",
]
