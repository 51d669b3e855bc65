"""docs/write-a-backend.md leads to a green run: its files and its Python, taken from the page, run as they stand.

So does the Python of docs/conformance.md.
"""

import re
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import corelm_testing.suite  # noqa: F401  # The inner runs forget what they import: import it for all of them.
from conftest import Fabricate
from helpers.environments import install, new_environment, run_in
from helpers.pages import Page

pytest_plugins = "pytester"

PAGE = Page(Path(__file__).parents[3] / "docs" / "write-a-backend.md")
FILES = {re.match(r"# (\S+)", block)[1]: block for block in PAGE.blocks("py")}
#: Backend → its pyproject.toml, and the class that its entry point names.
PROJECTS = {re.search(r'^name = "(\w+)-backend"', block, re.MULTILINE)[1]: block for block in PAGE.blocks("toml")}
NAMES = {name: re.search(rf'^{name} = "(.*)"', block, re.MULTILINE)[1] for name, block in PROJECTS.items()}
#: The changes of step 3, as (before, after): declare `top_k`, then honour it.
DECLARE, HONOUR = (
    ["".join(re.findall(rf"^[ {sign}](.*\n)", block, re.MULTILINE)) for sign in ("-", "+")]
    for block in PAGE.blocks("diff")
)
#: What the kit says of a backend that passes, with the page's … for numbers.
(GREEN,) = (
    re.escape(line).replace("…", r"(\d+)") for line in re.findall(r"^corelm conformance: .*", PAGE.text, re.MULTILINE)
)


def changed(source: str, *changes: list[str]) -> str:
    for before, after in changes:
        assert source.count(before) == 1, f"the page changes {before!r}, which dice_backend.py does not have once"
        source = source.replace(before, after)
    return source


def passed(result: pytest.RunResult) -> int:
    """Return how many tests passed in a run without failures."""
    (line,) = (found for line in result.stdout.lines if (found := re.fullmatch(GREEN, line)))
    return int(line[1])


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


@pytest.mark.process
@pytest.mark.parametrize("name", ["parrot", "dice"])
def test_a_project_installs_as_the_page_says(name: str, tmp_path: Path, tiny_model: Path) -> None:
    python, project = new_environment(tmp_path / "environment"), tmp_path / name
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECTS[name])
    (project / f"{name}_backend.py").write_text(FILES[f"{name}_backend.py"])
    if name == "dice":
        (project / "test_conformance.py").write_text(FILES["test_conformance.py"])
    (project / "tiny-model").symlink_to(tiny_model)
    install(python, project)  # pip install -e .
    listed = run_in(project, python, "-m", "corelm_cli", "backends")
    assert re.search(rf"^ *{name}\b.*", listed, re.MULTILINE), listed
    opened = f"import corelm; corelm.get_backend({name!r}, 'tiny-model').close(); print('opened')"
    assert run_in(project, python, "-c", opened) == "opened\n"
    # What others install holds the plugin, and not its tests or a model.
    run_in(project, sys.executable, "-m", "hatchling", "build", "-t", "wheel")
    (wheel,) = project.glob("dist/*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert [path for path in file.namelist() if "dist-info" not in path] == [f"{name}_backend.py"]


@pytest.mark.nightly
def test_the_page_leads_to_a_green_run(pytester: pytest.Pytester, fabricate: Fabricate, tiny_model: Path) -> None:
    result = run(pytester, fabricate, tiny_model, FILES["dice_backend.py"])
    assert passed(result) > 100


@pytest.mark.nightly
def test_what_is_declared_and_not_done_is_found(
    pytester: pytest.Pytester, fabricate: Fabricate, tiny_model: Path
) -> None:
    result = run(pytester, fabricate, tiny_model, changed(FILES["dice_backend.py"], DECLARE))
    (failed,) = re.findall(r"^FAILED \S+", PAGE.text, re.MULTILINE)
    result.stdout.fnmatch_lines([failed + "*"])


@pytest.mark.nightly
def test_what_is_declared_and_done_is_green(pytester: pytest.Pytester, fabricate: Fabricate, tiny_model: Path) -> None:
    result = run(pytester, fabricate, tiny_model, changed(FILES["dice_backend.py"], DECLARE, HONOUR))
    assert passed(result) > 100


def test_the_reference_of_the_kit_is_one_file_that_runs(
    pytester: pytest.Pytester, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pytester.path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(pytester.path)
    file, *methods = Page(PAGE.path.with_name("conformance.md")).blocks("py")
    pytester.makepyfile(test_conformance="\n".join([file, *(textwrap.indent(method, "    ") for method in methods)]))
    selected = "something_of_mine or does_not_depend_on_the_other_rows or test_every_log_prob or engine_kwargs"
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", selected)
    outcomes = result.parseoutcomes()
    assert outcomes.get("passed", 0) >= 1 and not {"failed", "error", "errors"} & set(outcomes), outcomes
