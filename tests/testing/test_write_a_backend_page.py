"""docs/write-a-backend.md leads to a green run: its files and its Python, taken from the page, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import corelm.testing.suite  # noqa: F401  # The inner runs forget what they import: import it for all of them.
from conftest import Fabricate
from helpers.pages import Page

pytest_plugins = "pytester"

PAGE = Page(Path(__file__).parents[2] / "docs" / "write-a-backend.md")
FILES = {re.match(r"# (\S+)", block)[1]: block for block in PAGE.blocks("py")}
NAMES = dict(re.search(r'^(\w+) = "(.*)"', block, re.MULTILINE).groups() for block in PAGE.blocks("toml"))
#: The changes of step 3, as (before, after): declare `top_k`, then honour it.
DECLARE, HONOUR = (
    ["".join(re.findall(rf"^[ {sign}](.*\n)", block, re.MULTILINE)) for sign in ("-", "+")]
    for block in PAGE.blocks("diff")
)
COUNTS = re.findall(r"^corelm conformance: .*", PAGE.text, re.MULTILINE)


def changed(source: str, *changes: list[str]) -> str:
    for before, after in changes:
        assert source.count(before) == 1, f"the page changes {before!r}, which dice_backend.py does not have once"
        source = source.replace(before, after)
    return source


def run(pytester: pytest.Pytester, fabricate: Fabricate, tiny_model: Path, plugin: str) -> pytest.RunResult:
    (pytester.path / "tiny-model").symlink_to(tiny_model)
    fabricate("dice-backend", "0.1", {"dice": NAMES["dice"]}, {"dice_backend": plugin})
    pytester.makepyfile(test_conformance=FILES["test_conformance.py"])
    return pytester.runpytest_inprocess("-p", "no:cacheprovider")


def test_the_parrot_does_what_the_page_says(
    fabricate: Fabricate, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    fabricate("parrot-backend", "0.1", {"parrot": NAMES["parrot"]}, {"parrot_backend": FILES["parrot_backend.py"]})
    PAGE.run()


def test_the_page_leads_to_a_green_run(pytester: pytest.Pytester, fabricate: Fabricate, tiny_model: Path) -> None:
    result = run(pytester, fabricate, tiny_model, FILES["dice_backend.py"])
    result.stdout.fnmatch_lines([COUNTS[0]])


def test_what_is_declared_and_not_done_is_found(
    pytester: pytest.Pytester, fabricate: Fabricate, tiny_model: Path
) -> None:
    result = run(pytester, fabricate, tiny_model, changed(FILES["dice_backend.py"], DECLARE))
    (failed,) = re.findall(r"^FAILED \S+", PAGE.text, re.MULTILINE)
    result.stdout.fnmatch_lines([failed + "*"])


def test_what_is_declared_and_done_is_green(pytester: pytest.Pytester, fabricate: Fabricate, tiny_model: Path) -> None:
    result = run(pytester, fabricate, tiny_model, changed(FILES["dice_backend.py"], DECLARE, HONOUR))
    result.stdout.fnmatch_lines([COUNTS[1]])
