"""Explanations that say which numbers a side would give: `PREDICTORS`, in the order in which they are tried.

Each is a function of a `Case` that yields `Prediction`s. A new explanation is a function in a file of this folder and
a line in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from corelm_compare.cases import Case, Prediction
from corelm_compare.predictions import contexts, logits, shift, units, variants

Predictor = Callable[[Case], Iterator[Prediction]]

#: name → predictor. Of equally good explanations, the first counts.
PREDICTORS: dict[str, Predictor] = {
    "shift": shift.predict,
    "units": units.predict,
    "bos-added": contexts.added,
    "first-token-dropped": contexts.dropped,
    "penalties": logits.penalized,
    "variants": variants.predict,
    "scale": logits.scaled,
    "vocab-padding": logits.padded,
    "renormalized": logits.renormalized,
    "eos-suppressed": logits.masked,
    "truncation": contexts.truncated,
    "chunked-prefill": contexts.chunked,
}
