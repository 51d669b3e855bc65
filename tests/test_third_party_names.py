"""Every name that core and the plugins use of another library exists in the one that is installed.

Each environment has other libraries, so `make test-newest` and the targets of engines and harnesses run this file, too.
"""

import tomllib
from pathlib import Path

import pytest

from corelm.spec.other_libraries import ELSEWHERE, NOT_OURS
from helpers.foreign_names import FORMER, HINTS, found, has
from helpers.third_party_names import LOOKED_UP, LookedUp, imports, installed, is_importable

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
#: Of the standard library, and of builds of torch for CUDA.
OTHERS = {"_getframe", "_timeout"}


@pytest.mark.parametrize("library", sorted(filter(installed, imports())))
def test_what_is_imported_exists(library: str) -> None:
    assert [each for each in sorted(imports()[library]) if not is_importable(*each)] == []


@pytest.mark.parametrize(
    "looked_up",
    [pytest.param(each, id=f"{each.package}: {each.names}") for each in LOOKED_UP if installed(each.package)],
)
def test_what_is_looked_up_exists(looked_up: LookedUp) -> None:
    assert looked_up.missing() == []


@pytest.mark.parametrize("owner", [each for each in HINTS if installed(each.partition(".")[0])])
def test_hints_are_about_names_that_exist(owner: str) -> None:
    (known,) = found(owner)
    assert [name for name in HINTS[owner].split() if not has(known, name)] == [] and not has(known, "gone")


def test_every_hint_is_looked_up() -> None:
    assert NOT_OURS.keys() | ELSEWHERE.keys() == {*" ".join([*HINTS.values(), FORMER]).split()}


def test_a_missing_name_is_found() -> None:
    assert LookedUp("torch", lambda: {"here"}, "here gone").missing() == ["gone"]
    assert LookedUp("torch", lambda: pytest, "fixture gone").missing() == ["gone"]
    assert is_importable("transformers.utils", "chat_parsing") and is_importable("json", "")
    assert not is_importable("json", "gone") and not is_importable("json.gone", "load")


def test_every_private_name_is_looked_up_here() -> None:
    linted = tomllib.loads(PROJECT.read_text())["tool"]["ruff"]["lint"]
    private = {*linted["flake8-self"]["extend-ignore-names"]}
    assert private - OTHERS <= {name for each in LOOKED_UP for name in each.names.split()}
