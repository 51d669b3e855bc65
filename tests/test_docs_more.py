"""What the documentation shows is run, and what it names exists.

Every Python block of docs/ runs, and every docstring example. Other tests run the pages in `ELSEWHERE` and the pages of
errors.
"""

import doctest
import html
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import corelm
import corelm_compare
import corelm_engine_kit
import corelm_fleet
import corelm_interop
import corelm_serve
import corelm_testing
from helpers.extras import missing_for
from helpers.pages import Page

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core" / "corelm"
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RELEASING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
#: Pages that other tests run: test_docs.py, testing/test_write_a_backend_page.py, harnesses/test_lm_eval_command.py.
ELSEWHERE = {
    *("README.md", "docs/quickstart.md", "docs/tutorial.md", "docs/containers.md", "docs/kl.md"),
    *("docs/write-a-backend.md", "docs/lm-eval.md"),
}
#: Pages that start other processes: engines in processes and fleets of them.
PROCESSES = ("scaling.md", "fleets-and-hosting.md", "several-gpus.md", "many-engines-in-one-program.md")
#: Libraries without which a page is skipped. make test-harnesses runs the pages of TRL and Inspect.
NEEDED = {
    "torchrl.md": ["torchrl"],
    "trl.md": ["trl"],
    "measure.md": ["opentelemetry.sdk"],
    "serving.md": ["openai", "uvicorn"],
    "inspect.md": ["inspect_ai"],
}
#: Modules that need an extra which the test environment of core need not have are imported by their own tests.
MODULES = [
    module.name
    for package in (
        corelm,
        corelm_engine_kit,
        corelm_testing,
        corelm_fleet,
        corelm_interop,
        corelm_serve,
        corelm_compare,
    )
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.startswith(("corelm_fleet.command", "corelm_testing.commands"))
]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def is_run_here(path: Path) -> bool:
    elsewhere = path.relative_to(ROOT).as_posix() in ELSEWHERE or path.parent.name == "errors"
    return not elsewhere and bool(Page(path).blocks("python"))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=str(path.relative_to(ROOT)),
            marks=[pytest.mark.process] if path.name in PROCESSES else [],
        )
        for path in filter(is_run_here, PAGES)
    ],
)
def test_every_python_block_runs(path, tiny_model, tmp_path, monkeypatch):
    for library in NEEDED.get(path.name, ()):
        pytest.importorskip(library)
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    Page(path).run()


def test_docstring_examples_give_the_output_they_show():
    examples = 0
    for name in MODULES:
        if not missing_for(name):
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            result = doctest.testmod(importlib.import_module(name), optionflags=flags)
            assert result.failed == 0, name
            examples += result.attempted
    assert examples >= 10


def test_links_between_pages_have_a_target():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


# ---------------------------------------------------------------- docs/architecture.md


def located(path: str) -> Path:
    """Where a path of the page is: in core, in another distribution, or in the repository."""
    top = path.partition("/")[0]
    if folders := [*ROOT.glob(f"[kpa]*/*/src/{top}")]:
        return folders[0].parent / path
    return CORE / path if (CORE / top).exists() else ROOT / path


def test_every_path_that_the_architecture_names_exists():
    named = set(re.findall(r"`([\w/]+(?:\.py|\.toml|/))`|^ *([\w/]+/)  ", ARCHITECTURE, re.MULTILINE))
    named = {path or folder for path, folder in named}
    assert len(named) > 50 and [path for path in sorted(named) if not located(path).exists()] == []


def test_every_name_of_a_package_that_is_written_exists():
    text = "".join(page.read_text() for page in PAGES if page.name != "CHANGELOG.md")
    written = {*re.findall(r"\b(corelm_\w+)\.(?!md\b)(\w+)", text)}
    of_kit, _, of_spec = (corelm_engine_kit.__doc__ or "").partition("`corelm.spec`:")
    for package, listed in (("corelm_engine_kit", of_kit), ("corelm.spec", of_spec)):
        heads = " ".join(re.findall(r"^- ([^:]*):", listed, re.MULTILINE))
        assert heads
        written |= {(package, name) for name in re.findall(r"`(\w+)`", heads)}
    found = {(package, name) for package, name in written if hasattr(importlib.import_module(package), name)}
    missing = [each for each in written - found if importlib.util.find_spec(".".join(each)) is None]
    assert len(written) > 40 and missing == []


def test_drawings_are_up_to_date_and_name_files_that_exist():
    for drawing in sorted((ROOT / "docs" / "drawings").glob("*.dot")):
        source = html.unescape(drawing.read_text())
        texts = re.findall(r"<b>(.*?)</b><br/>(.*?)>\]|label=\"(.*?)\\l\"", source)
        cells = [re.split(r"<[^>]+>\s*", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", source, re.DOTALL)]
        picture = html.unescape(drawing.with_suffix(".svg").read_text()).replace("\xa0", " ")
        assert texts or cells, f"{drawing.name} has no text that this test knows how to find"
        for text in filter(None, sum([*texts, *map(tuple, cells)], ())):
            assert text in picture, f"{text!r} is not in {drawing.stem}.svg: run make drawings"
            for path in re.findall(r"\w+/\w+\.py", text):
                assert located(path).exists(), path
