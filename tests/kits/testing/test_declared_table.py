"""What docs/write-a-backend.md says of capabilities, sampling parameters and rows is complete, and true of the kit."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import corelm_testing
from corelm import Capabilities, Ragged
from corelm.spec.capabilities import GenerationMode
from corelm.spec.sampling import EVERY_ENGINE, FIELDS
from corelm_testing import BackendConformance
from corelm_testing.plugin import standard_tests
from corelm_testing.usage import DECLARABLE
from helpers.each import each
from helpers.pages import Page

PAGE = Page(Path(__file__).parents[3] / "docs" / "write-a-backend.md")
TESTS = standard_tests(BackendConformance)


def table(first_title: str) -> list[tuple[str, ...]]:
    """Return the cells of the rows of the table whose first column has this title."""
    (found,) = re.findall(rf"^\| {re.escape(first_title)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.text, re.MULTILINE)
    rows = [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in found.splitlines()]
    assert len({len(row) for row in rows}) == 1, "a row has another number of cells"
    return rows


def names(cell: str) -> set[str]:
    """Return what is in backticks in a cell, each without its value: ``sampling={name: range}`` is sampling."""
    return {re.match(r"[\w.]*", name)[0].removeprefix("request.") for name in re.findall(r"`([^`]+)`", cell)}


#: Capability, sampling parameter or generation mode → what the last column of its row names.
DECLARED = {name: names(row[-1]) for row in table("declare") for name in names(row[0])}


def guarded() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield the theme, the function and the capabilities of every test or fixture of the kit that has some."""
    for theme in dict.fromkeys(TESTS.values()):
        tree = ast.parse(inspect.getsource(theme))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            asked = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("needs", "require")]
            constants = [arg.value for call in asked for arg in call.args if isinstance(arg, ast.Constant)]
            if constants:
                needed = frozenset(name.partition(":")[2] or name for name in constants)
                yield theme.corelm_theme, function.name, needed


GUARDED = list(guarded())


def test_every_capability_is_in_the_table() -> None:
    fields = {each.name for each in dataclasses.fields(Capabilities)}
    assert fields | set(DECLARABLE) | set(GenerationMode.__args__) == set(DECLARED)


def test_the_capabilities_of_the_kits_tests_were_found() -> None:
    marks = {name: getattr(vars(owner)[name], "pytestmark", ()) for name, owner in TESTS.items()}
    marked = {name for name, own in marks.items() if any(mark.name == "corelm_needs" for mark in own)}
    assert len(marked) > 80 and marked <= {function for _, function, _ in GUARDED}


@each("theme, function, capabilities", GUARDED)
def test_every_test_of_a_capability_is_found_from_a_row_of_it(
    theme: str, function: str, capabilities: frozenset[str]
) -> None:
    assert capabilities <= set(DECLARED)
    assert any({theme, function} & DECLARED[name] for name in capabilities), (
        f"no row of {', '.join(sorted(capabilities))} names the theme {theme} or the test {function}"
    )


def test_the_table_names_tests_and_themes_that_exist() -> None:
    for name, told in DECLARED.items():
        tests = {each for each in told if each.startswith("test_")}
        assert tests <= TESTS.keys(), name
        methods = {each for each in told - tests if each not in corelm_testing.THEMES}
        assert methods <= {"new_weights", "new_adapters", "engine_sampling"}, name


def test_every_sampling_parameter_is_explained_with_what_declares_it() -> None:
    declared: dict[str, str] = {}
    for first, by, _ in table("`request.sampling.…`"):
        declared |= dict.fromkeys(names(first), by)
    assert set(declared) == set(FIELDS)
    assert {name for name, by in declared.items() if by == "in `sampling`"} == set(FIELDS) - EVERY_ENGINE


def test_every_method_of_ragged_is_named() -> None:
    public = {name for name in vars(Ragged) if not name.startswith("_")} | {"values", "lengths"}
    (rows,) = re.findall(r"^### Rows\n(.*?)^### ", PAGE.text, re.DOTALL | re.MULTILINE)
    told = names(rows) - {"Ragged", "len"}
    assert told == public
