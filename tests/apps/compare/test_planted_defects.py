"""Each planted defect is named, the right side is accused, and nothing else is.

`helpers/planted_defects.py` has the defects: real changes of a real computation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corelm_compare import compare
from helpers.planted_defects import DEFECTS, PROMPTS, Defect, sound


def check(defect: Defect, folder: Path, seed: int, **options: Any) -> None:
    with sound(folder) as right, defect.open(folder) as wrong:
        found = compare([right, wrong], PROMPTS, oracle=folder, seed=seed, **options)
    print(found)
    assert {(cause.id, cause.side) for cause in found.causes} == {(defect.cause, "planted")}
    assert found.verdict == ("rounding" if defect.cause == "dtype" else "differ")
    assert found.exit_code == (0 if defect.cause == "dtype" else 1)
    for cause in found.causes:
        assert cause.evidence and cause.advice


#: A defect of each cause. make nightly plants the others.
FIRST = {defect.cause: name for name, defect in reversed(DEFECTS.items())}.values()


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.nightly) for name in DEFECTS]
)
def test_a_planted_defect_is_named(name, folder_of):
    """In a model of one layer, with half as many sampled tokens."""
    defect = DEFECTS[name]
    # The layers of gemma2 take turns: every second one has a sliding window.
    small = {} if defect.family == "gemma2" else {"num_hidden_layers": 1}
    check(defect, folder_of(defect.family, 3, **defect.changes, **small), 3, sampling={"max_new_tokens": 12})
