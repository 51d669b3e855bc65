"""The pages that a newcomer reads run as they stand: README, quickstart, tutorial, containers, KL.

tests/test_docs_more.py runs the other pages and checks what the documentation names.
"""

from pathlib import Path

import pytest

from helpers.pages import Page

ROOT = Path(__file__).parent.parent
README = Page(ROOT / "README.md")


@pytest.fixture(autouse=True)
def folder_with_a_model(tiny_model, tmp_path, monkeypatch):
    """Run each page where the model is that the README makes."""
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["quickstart", "tutorial", "containers", "kl"])
def test_the_python_of_a_page_runs(name):
    page = Page(ROOT / "docs" / f"{name}.md")
    assert page.blocks("python")
    page.run()


def test_each_block_of_the_readme_runs_alone():
    assert README.blocks("python") and not README.blocks("py")
    for block in README.blocks("python"):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
