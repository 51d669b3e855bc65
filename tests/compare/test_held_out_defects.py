"""Defects that no detector was written for: whatever is said of them, nothing wrong is said."""

from __future__ import annotations

import pytest

from corelm.compare import compare
from helpers.held_out_defects import HELD_OUT
from helpers.planted_defects import PROMPTS, sound

#: These are not named. The first is not even seen: no question touches what is wrong.
MISSED = {"prefixes kept over an update, in late scores", "rope_theta of 50,000"}


@pytest.mark.parametrize(
    ("name", "family", "seed"),
    [
        pytest.param(name, family, seed + 11, marks=[pytest.mark.thorough] if seed else [], id=f"{name}, {family}")
        for name, (_, _, families) in HELD_OUT.items()
        for seed, family in enumerate(families)
    ],
)
def test_no_wrong_cause_is_named(name, family, seed, folder_of):
    expected, open_planted, _ = HELD_OUT[name]
    folder = folder_of(family, seed)
    with sound(folder) as right, open_planted(folder) as wrong:
        found = compare([right, wrong], PROMPTS, oracle=folder, seed=seed - 11)
    print(found)
    named = {(cause.id, cause.side) for cause in found.causes}
    assert named == (set() if expected is None or name in MISSED else {(expected, "planted")})
    if expected is None:
        assert found.verdict == "unexplained" and found.ruled_out
