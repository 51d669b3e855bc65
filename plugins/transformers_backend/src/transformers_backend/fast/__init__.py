"""Accelerations only: delete this folder, open with ``fast=False``, and the numbers stay the same, only slower.

It plugs in at two places: `FastDecoder` overrides two methods of `Decoder`, `FastScorer` two of `Scorer`.

==================== ==================================================================================================
file                 what it saves
==================== ==================================================================================================
`tiles.py`           log-probabilities without logits: no tensor is as wide as the vocabulary
`logit_tiles.py`     the tiles themselves, and their sums
`set_logits.py`      scores over a set of ids read the head's rows of these ids only
`top_logits.py`      finds the most probable ids, or given ones, while the tiles are summed
`top_logprobs.py`    their log-probs, and that of all others together, with gradients
`tiled_scores.py`    everything that may be asked of a position, from tiles
`reductions.py`      on GPUs, how a tile is reduced to a number a row
`triton_head.py`     kernels for that
`head.py`            decides whether a model's head can be computed in tiles
`head_state.py`      what that rests on, so that it is decided once
`split.py`           runs a model's body without its head, and its head without its body
`layouts.py`         rows without padding; the start that rows have in common is read once
`packing.py`         attention over such rows
`segments.py`        which of their tokens attend to which
`varlen.py`          on GPUs, attention in many of them by one kernel
`reading.py`         the body's hidden states of packed or padded rows
`cache.py`           decoding writes keys and values into buffers instead of copying all of them at every token
`onednn.py`          matrix products on a CPU, with another library
`probing.py`         what has to be tried on the model before any of this is used for scoring
`probing_queries.py` the same for sets and for several ids
==================== ==================================================================================================

Each acceleration of scoring is tried on the model and compared with the model's own forward. What does not agree is not
used: that step then runs as in the plain backend.
"""

from transformers_backend.fast.decoding import FastDecoder
from transformers_backend.fast.scoring import FastScorer

__all__ = ["FastDecoder", "FastScorer"]
