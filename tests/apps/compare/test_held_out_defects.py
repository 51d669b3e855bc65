"""Defects that no detector was written for: whatever is said of them, nothing wrong is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corelm_compare import compare
from helpers.held_out_defects import HELD_OUT
from helpers.planted_defects import PROMPTS, sound

#: These are not named. The first is not even seen: no question touches what is wrong.
MISSED = {"prefixes kept over an update, in late scores", "rope_theta of 50,000"}


def check(name: str, folder: Path, seed: int, **options: Any) -> None:
    expected, open_planted, _ = HELD_OUT[name]
    with sound(folder) as right, open_planted(folder) as wrong:
        found = compare([right, wrong], PROMPTS, oracle=folder, seed=seed, **options)
    print(found)
    named = {(cause.id, cause.side) for cause in found.causes}
    assert named == (set() if expected is None or name in MISSED else {(expected, "planted")})
    if expected is None:
        assert found.verdict == "unexplained" and found.ruled_out


@pytest.mark.parametrize("name", HELD_OUT)
def test_no_wrong_cause_is_named(name, folder_of):
    folder = folder_of(HELD_OUT[name][2][0], 11, num_hidden_layers=1)
    check(name, folder, 0, sampling={"max_new_tokens": 12})


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, each in HELD_OUT.items() for number in range(len(each[2]))]
)
def test_no_wrong_cause_is_named_in_any_family(name, number, folder_of):
    check(name, folder_of(HELD_OUT[name][2][number], number + 11), number)
