"""Which weights sampled which tokens, from vLLM's labels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from corelm.spec import GenerateRequest, WeightUpdate
from corelm_engine_kit import RowError
from helpers.each import case
from helpers.requests import generation
from vllm_backend.versions import label_of, runs_of


def request(version: str = "mine", update: int = 2) -> GenerateRequest:
    return generation(weight_version=version, weight_update=update)


def spans(*parts: tuple[str, int, int]) -> list[Any]:
    return [SimpleNamespace(version=version, start=start, end=end) for version, start, end in parts]


def test_labels_of_later_updates_are_new_versions() -> None:
    for given, count, expected in [
        ([("default", 0, 4)], 4, (("mine", 0),)),
        ([("2:other", 0, 4)], 4, (("mine", 0),)),
        ([("2:other", 0, 1), ("3:new", 1, 4)], 4, (("mine", 0), ("new", 1))),
        ([("2:other", 0, 1), ("3:a:b", 1, 3), ("4:c", 3, 4)], 4, (("mine", 0), ("a:b", 1), ("c", 3))),
        ([("3:new", 0, 4)], 4, (("new", 0),)),
        # Tokens that do not belong to the answer, after a stop string.
        ([("default", 0, 2), ("3:new", 2, 4)], 2, (("mine", 0),)),
        ([("1:older", 0, 1), ("2:other", 1, 4)], 4, (("mine", 0),)),
        ([], 0, (("mine", 0),)),
        (None, 0, (("mine", 0),)),
    ]:
        with case(given, count, expected):
            found = runs_of(None if given is None else spans(*given), request(), count)
            assert found == expected


def test_a_token_without_a_label_fails_the_row() -> None:
    for given, token in [(None, 0), ([("default", 0, 2)], 2), ([("default", 0, 1), ("3:new", 2, 4)], 1)]:
        with case(given, token), pytest.raises(RowError, match=f"which weights sampled token {token} of the answer"):
            runs_of(None if given is None else spans(*given), request(), 4)


def test_the_label_names_the_update() -> None:
    assert label_of(WeightUpdate(version="a:b", when="now", number=7)) == "7:a:b"
