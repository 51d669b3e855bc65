"""The two files shown in docs/conformance.md run as printed and pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import corelm.testing.suite  # noqa: F401  # The inner runs forget their imports: import it once for all of them.
from conftest import Fabricate

pytest_plugins = "pytester"

PAGE = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
PLUGIN, SUITE = re.findall(r"^```py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[:2]


def run(pytester: pytest.Pytester, fabricate: Fabricate, tiny_model: Path, plugin: str) -> pytest.RunResult:
    (pytester.path / "tiny-model").symlink_to(tiny_model)
    fabricate("dice-backend", "0.1", {"dice": "dice_backend:Dice"}, {"dice_backend": plugin})
    pytester.makepyfile(test_conformance=SUITE)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider")


def test_the_files_of_the_page_pass(pytester: pytest.Pytester, fabricate: Fabricate, tiny_model: Path) -> None:
    result = run(pytester, fabricate, tiny_model, PLUGIN)
    (told,) = re.findall(r"^corelm conformance: .*", PAGE, re.MULTILINE)
    result.stdout.fnmatch_lines([told])


def test_a_declared_capability_that_is_missing_fails_as_the_page_says(
    pytester: pytest.Pytester, fabricate: Fabricate, tiny_model: Path
) -> None:
    claim = PLUGIN.replace("score=True,", 'score=True, sampling={"top_k": None},')
    result = run(pytester, fabricate, tiny_model, claim)
    (told,) = re.findall(r"^FAILED \S+", PAGE, re.MULTILINE)
    result.stdout.fnmatch_lines([told + "*"])
