"""A shift by one position: the numbers are those of the token before or after."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from corelm_compare.cases import Case, Prediction

_ADVICE = (
    "compare how many log-probs the engine returns with how many ids it was given: entry t must be the log-prob of "
    "id t given those before it"
)


def predict(case: Case) -> Iterator[Prediction]:
    for by, words in ((1, "the number of the next token at each position"), (-1, "that of the token before")):
        shifted = []
        for row in case.truth:
            moved = torch.full_like(row, torch.nan)
            if by > 0:
                moved[:-by] = row[by:]
            else:
                moved[-by:] = row[:by]
            shifted.append(moved)
        yield Prediction(id="shift", changed=words, numbers=shifted, advice=_ADVICE, figures={"by": by})
