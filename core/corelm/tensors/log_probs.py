"""`log_probs`: the log-softmax of logits over a large vocabulary."""

from __future__ import annotations

from torch import Tensor


def log_probs(logits: Tensor) -> Tensor:
    """Return the log-softmax of float[..., V] over its last dimension, in its dtype.

    On a CPU, `Tensor.log_softmax` in float32 is off by up to 4e-5 for V = 49,152: where one id has nearly all
    probability, the small exponentials of the others are lost one by one in a sum near 1. `logsumexp` adds in pairs.
    """
    return logits - logits.logsumexp(-1, keepdim=True)
