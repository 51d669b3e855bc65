"""A page for every error and warning: its example raises that class, and prints the message that the page shows."""

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm import errors
from corelm.kl import transforms
from corelm_engine_kit import TransientError
from helpers.pages import Page

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "errors"
INDEX = Page(FOLDER / "index.md")
PUBLIC = sorted(set(re.findall(r"`(corelm[._]\w+)`", (ROOT / "README.md").read_text().partition("## Public names")[2])))


def exported() -> dict[str, type[BaseException]]:
    """Return every exception and warning of core's public modules, by name."""
    # The modules of `interop` need libraries. A `TransientError` stays within a plugin, so that users never get one.
    modules = [corelm, *(importlib.import_module(name) for name in PUBLIC if name != "corelm_interop")]
    modules.append(importlib.import_module("corelm_testing.cassette"))
    found = (getattr(module, name) for module in modules for name in dir(module) if not name.startswith("_"))
    return {
        each.__name__: each
        for each in found
        if isinstance(each, type) and issubclass(each, (errors.CoreLMError, Warning)) and each is not TransientError
    }


CLASSES = exported()
PAGES = {path.stem: Page(path) for path in sorted(FOLDER.glob("*.md")) if path != INDEX.path}


class _Noting(ast.NodeTransformer):
    """Makes every ``except … as error`` of a block put its exception into the list ``_caught_here``."""

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        note = ast.parse(f"_caught_here.append({node.name})").body[0]
        node.body.insert(0, note)
        return node


def run(page: Page) -> list[Any]:
    """Run the page's blocks; return the exceptions that they catch and the warnings that they record."""
    names = page.run(_Noting(), _caught_here=[])
    return [*names["_caught_here"], *(each.message for each in names.get("caught", ()))]


def is_shown(printed: str, shown: str) -> bool:
    """Return whether a page shows what was printed: lines may be wrapped, and "…" stands for any text."""
    wanted = ".*".join(re.escape(part) for part in " ".join(shown.split()).split("…"))
    # A message may have an ellipsis itself.
    return re.fullmatch(wanted, " ".join(printed.split()), re.DOTALL) is not None


def test_the_modules_are_those_of_the_readme():
    assert {"corelm.errors", "corelm.kl", "corelm.batching", "corelm_engine_kit"} <= set(PUBLIC)


def test_every_error_and_warning_has_a_page_and_every_page_a_class():
    assert sorted(PAGES) == sorted(CLASSES)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_example_of_a_page_raises_its_class_and_prints_what_it_shows(
    name, tiny_model, tmp_path, monkeypatch, capsys
):
    page = PAGES[name]
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(transforms, "warned", set())
    (shown,) = page.blocks("text")
    caught = run(page)
    printed = capsys.readouterr().out
    assert is_shown(printed, shown), f"{page.path.name} prints\n{printed}"
    if name == "CoreLMError":
        assert all(isinstance(each, errors.CoreLMError) for each in caught) and caught
    else:
        assert [type(each) for each in caught] == [CLASSES[name]]


def test_a_page_says_what_to_type_and_names_every_attribute_and_builtin_class():
    for name, page in PAGES.items():
        kind = CLASSES[name]
        assert page.text.startswith(f"# {name}\n") and "## What to type" in page.text, name
        own = re.findall(r"^ +(\w+): ", (kind.__doc__ or "").partition("Attributes:")[2], re.MULTILINE)
        assert [attribute for attribute in own if f"`{attribute}`" not in page.text] == [], name
        first = page.text.partition("```python")[0]
        bases = [base.__name__ for base in kind.__bases__ if base not in (errors.CoreLMError, Exception)]
        assert [base for base in bases if base not in first and not base.startswith("_")] == [], name


def test_the_tree_shows_each_class_with_what_else_it_is():
    for name in PAGES:
        (line,) = [line for line in INDEX.text.splitlines() if f"[{name}]({name}.md)" in line]
        if issubclass(CLASSES[name], errors.CoreLMError):
            assert CLASSES[name].__bases__[-1].__name__ in line, name
