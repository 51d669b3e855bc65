"""Another base of the logarithm: numbers in bits, or in decimal digits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from corelm_compare.cases import Case, Prediction


def predict(case: Case) -> Iterator[Prediction]:
    for base, words in ((2.0, "the logarithm to base 2"), (10.0, "the logarithm to base 10")):
        yield Prediction(
            id="units",
            changed=words,
            numbers=[row / math.log(base) for row in case.truth],
            advice=f"multiply the engine's numbers by {math.log(base):.4g}: log-probs are in nats",
            figures={"base": base},
        )
