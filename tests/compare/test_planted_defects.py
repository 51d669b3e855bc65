"""Each planted defect is named, the right side is accused, and nothing else is.

`helpers/planted_defects.py` has the defects: real changes of a real computation.
"""

from __future__ import annotations

import pytest

from corelm.compare import compare
from helpers.planted_defects import DEFECTS, PROMPTS, sound

#: CI plants each defect into one family; the others are marked.
CASES = [
    pytest.param(
        name, family, changes, number + 3, id=f"{name}, {family}", marks=[pytest.mark.thorough] if number else []
    )
    for name, defect in DEFECTS.items()
    for number, (family, changes) in enumerate(defect.families)
]


@pytest.mark.parametrize(("name", "family", "changes", "seed"), CASES)
def test_a_planted_defect_is_named(name, family, changes, seed, folder_of):
    defect, folder = DEFECTS[name], folder_of(family, seed, **changes)
    with sound(folder) as right, defect.open(folder) as wrong:
        found = compare([right, wrong], PROMPTS, oracle=folder, seed=seed)
    print(found)
    assert {(cause.id, cause.side) for cause in found.causes} == {(defect.cause, "planted")}
    assert found.verdict == ("rounding" if defect.cause == "dtype" else "differ")
    assert found.exit_code == (0 if defect.cause == "dtype" else 1)
    for cause in found.causes:
        assert cause.evidence and cause.advice


def test_there_are_enough_of_them():
    assert len(DEFECTS) >= 20 and len({defect.cause for defect in DEFECTS.values()}) >= 20
