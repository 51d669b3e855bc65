"""What the documentation shows is run: every Python block of the README and of docs/, and every docstring example."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import corelm
from helpers.torchrl import skip_without_torchrl

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: The modules of the command line need an extra that core's test environment may lack. Their own tests import them.
MODULES = [m.name for m in pkgutil.walk_packages(corelm.__path__, "corelm.") if not m.name.startswith("corelm.cli")]
TORCHRL = "corelm.interop.torchrl"


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name)
def test_every_python_block_runs(page, tiny_model, tmp_path, monkeypatch):
    if page.name == "torchrl.md":
        skip_without_torchrl()
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    text, names = page.read_text(), {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        # Line numbers in a traceback are then those of the page.
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(source, str(page), "exec"), names)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_give_what_they_say(name):
    if name.startswith(TORCHRL):
        skip_without_torchrl()
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


def test_there_are_docstring_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [name for name in MODULES if not name.startswith(TORCHRL)]
    found = sum(len(test.examples) for name in modules for test in finder.find(importlib.import_module(name)))
    assert found >= 10


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
