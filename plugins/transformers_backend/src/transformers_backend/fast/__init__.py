"""Accelerations only: delete this folder, open with ``fast=False``, and the numbers stay the same, only slower.

It plugs in at two places: decoding runs within `quick_products`, and `FastScorer` overrides methods of `Scorer`.

================= =====================================================================================================
file              what it saves
================= =====================================================================================================
`tiles.py`        log-probabilities without logits: no tensor is as wide as the vocabulary
`triton_head.py`  on GPUs, kernels that reduce a tile to a number a row
`head.py`         runs a model's body without its head, and decides whether the head can be computed in tiles
`scoring.py`      rows without padding; the start that rows have in common is read once
`attention.py`    attention over such rows; on GPUs, in many of them by one kernel
`onednn.py`       matrix products on a CPU, with another library, for decoding too
================= =====================================================================================================

Each acceleration of scoring is tried on the model and compared with the model's own forward. What does not agree is not
used: that step then runs as in the plain backend.
"""

from transformers_backend.fast.onednn import quick_products
from transformers_backend.fast.scoring import FastScorer

__all__ = ["FastScorer", "quick_products"]
