"""What the documentation shows is run, and what it names exists.

Every Python block of the README and of docs/ is run, and every docstring example. docs/write-a-backend.md installs
plugins, so tests/testing/test_write_a_backend_page.py runs it, and tests/test_error_pages.py the pages of errors.
"""

import doctest
import html
import importlib
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import corelm
from helpers.extras import missing_for
from helpers.pages import Page
from helpers.torchrl import skip_without_torchrl

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core" / "corelm"
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RELEASING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
#: Modules that need an extra which the test environment of core need not have are imported by their own tests.
MODULES = [m.name for m in pkgutil.walk_packages(corelm.__path__, "corelm.") if not m.name.startswith("corelm.cli")]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def is_run_elsewhere(path: Path) -> bool:
    return path.name == "write-a-backend.md" or path.parent.name == "errors"


@pytest.mark.parametrize(
    "page",
    [page for path in PAGES if (page := Page(path)).blocks("python") and not is_run_elsewhere(path)],
    ids=lambda page: str(page.path.relative_to(ROOT)),
)
def test_every_python_block_runs(page, tiny_model, tmp_path, monkeypatch):
    if page.path.name == "torchrl.md":
        skip_without_torchrl()
    if page.path.name == "trl.md":
        pytest.importorskip("trl", reason="TRL is not installed; make test-harnesses runs the page")
    if page.path.name == "measure.md":
        pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")
    if page.path.name == "serving.md":
        pytest.importorskip("openai", reason="the official client is not installed")
        pytest.importorskip("uvicorn", reason="the server needs the extra serve")
    if page.path.name == "inspect.md":
        pytest.importorskip("inspect_ai", reason="inspect_ai is not installed; make test-harnesses runs the page")
    if page.path.name == "lm-eval.md":
        pytest.skip("tests/harnesses/test_lm_eval_command.py runs it, after the commands of the page")
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    page.run()


@pytest.mark.parametrize("number", range(len(Page(ROOT / "README.md").blocks("python"))))
def test_a_block_of_the_readme_runs_alone(number, tiny_model, tmp_path, monkeypatch):
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    exec(compile(Page(ROOT / "README.md").blocks("python")[number], "README.md", "exec"), {"__name__": "readme"})


def test_the_readme_shows_no_python_that_is_not_run():
    assert not Page(ROOT / "README.md").blocks("py")


def test_every_command_that_a_page_shows_names_a_file_that_exists():
    for page in [*PAGES, *ROOT.glob("plugins/*/README.md")]:
        for path in re.findall(r"\bpython ([\w/.-]+\.py)", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: python {path}"
        for module in re.findall(r"\bpython -m (corelm[\w.]*)", page.read_text()):
            assert find_spec(module), f"{page.name}: python -m {module}"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_give_the_output_they_show(name):
    if library := missing_for(name):
        pytest.skip(f"{library} is not installed")
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


def test_there_are_docstring_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [name for name in MODULES if not missing_for(name)]
    found = sum(len(test.examples) for name in modules for test in finder.find(importlib.import_module(name)))
    assert found >= 10


def test_links_between_pages_have_a_target():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


# ---------------------------------------------------------------- docs/architecture.md


def located(path: str) -> Path:
    """Where a path of the page is: in core, in a plugin, or in the repository."""
    top = path.partition("/")[0]
    if top.endswith("_backend"):
        return ROOT / "plugins" / top / "src" / path
    return CORE / path if (CORE / top).exists() else ROOT / path


def test_every_path_that_the_architecture_names_exists():
    named = set(re.findall(r"`([\w/]+(?:\.py|\.toml|/))`|^ *([\w/]+/)  ", ARCHITECTURE, re.MULTILINE))
    named = {path or folder for path, folder in named}
    assert len(named) > 50 and [path for path in sorted(named) if not located(path).exists()] == []


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs" / "drawings").glob("*.dot")), ids=lambda path: path.name)
def test_a_drawing_is_up_to_date_and_names_files_that_exist(drawing):
    source = html.unescape(drawing.read_text())
    texts = re.findall(r"<b>(.*?)</b><br/>(.*?)>\]|label=\"(.*?)\\l\"", source)
    cells = [re.split(r"<[^>]+>\s*", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", source, re.DOTALL)]
    picture = html.unescape(drawing.with_suffix(".svg").read_text()).replace("\xa0", " ")
    assert texts or cells, f"{drawing.name} has no text that this test knows how to find"
    for text in filter(None, sum([*texts, *map(tuple, cells)], ())):
        assert text in picture, f"{text!r} is not in {drawing.stem}.svg: run make drawings"
        for path in re.findall(r"\w+/\w+\.py", text):
            assert located(path).exists(), path
