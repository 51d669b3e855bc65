"""Every name in the tables of other libraries exists. Those of vLLM, TRL and lm-eval are checked where they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.foreign_names import names_in_tables, unknown_names
from helpers.pages import Page
from helpers.torchrl import skip_without_torchrl

DOCS = Path(__file__).parents[3] / "docs"


def test_every_name_of_the_page_about_transformers_exists():
    page = Page(DOCS / "how-to" / "from-transformers.md")
    assert len([*names_in_tables(page, "transformers")]) > 25
    assert unknown_names(page, "transformers") == []


def test_every_name_of_the_page_about_torchrl_exists():
    skip_without_torchrl()
    page = Page(DOCS / "torchrl.md")
    assert len([*names_in_tables(page, "torchrl")]) > 30
    assert unknown_names(page, "torchrl") == []


@pytest.mark.parametrize(
    ("owner", "name", "missing"),
    [
        ("transformers.GenerationConfig", "max_new_tokens", []),
        ("transformers.GenerationConfig", "max_tokens", ["transformers.GenerationConfig: max_tokens"]),
        ("transformers.GenerationConfig", "top_p=0.5", ["transformers.GenerationConfig: top_p=0.5"]),
        ("transformers.GenerationConfiguration", "top_p", ["transformers.GenerationConfiguration"]),
    ],
)
def test_a_name_that_a_library_lacks_is_found(tmp_path, owner, name, missing):
    path = tmp_path / "page.md"
    path.write_text(f"| `{owner}` | here |\n|---|---|\n| `{name}` | the same |\n")
    assert unknown_names(Page(path), "transformers") == missing


def test_each_page_is_checked_somewhere():
    tests = Path(__file__).parents[2]
    files = [
        Path(__file__),
        *tests.glob("harnesses/test_*page*.py"),
        tests / "engines" / "vllm" / "test_moving_page.py",
    ]
    named = "".join(path.read_text() for path in files)
    heading = re.compile(r"^\| ?`(?:transformers|torchrl|trl|lm_eval|vllm)\.", re.MULTILINE)
    pages = {path.name for path in DOCS.rglob("*.md") if heading.search(path.read_text())}
    assert pages == {"from-transformers.md", "from-vllm.md", "torchrl.md", "trl.md", "lm-eval.md"}
    assert {page for page in pages if page not in named} == set()
