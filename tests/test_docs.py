"""What the documentation shows is run: every Python block of the README and of docs/, and every docstring example."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import corelm

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: Modules that need an extra which the test environment of core need not have are imported by their own tests.
MODULES = [m.name for m in pkgutil.walk_packages(corelm.__path__, "corelm.") if not m.name.startswith("corelm.cli")]


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name)
def test_every_python_block_runs(page, tiny_model, tmp_path, monkeypatch):
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    text, names = page.read_text(), {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        # Line numbers in a traceback are then those of the page.
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(source, str(page), "exec"), names)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_give_what_they_say(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


def test_there_are_docstring_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = sum(len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name)))
    assert found >= 10


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
