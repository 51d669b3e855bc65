"""What importing core loads, seen from a new interpreter, and whether every public name exists."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import corelm
from helpers.each import each
from helpers.extras import missing_for

ENGINES = {"transformers", "vllm", "sglang", "ray", "peft", "transformers_backend"}
#: The kernel, the kits and the applications.
PACKAGES = (
    *(
        "corelm",
        "corelm_engine_kit",
        "corelm_testing",
        "corelm_fleet",
        "corelm_interop",
        "corelm_serve",
        "corelm_compare",
    ),
    "corelm_cli",
)
ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "tensordict", "numpy"}


def imported_by(code: str) -> set[str]:
    """Return the top-level names of all modules that a new interpreter has loaded after running `code`."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.process
def test_importing_core_its_registry_and_the_pytest_plugin_is_light():
    code = "import corelm; dir(corelm); import corelm.backend.registry, corelm_testing.plugin"
    assert not imported_by(code) & (HEAVY | ENGINES)


@pytest.mark.process
def test_the_command_lists_backends_without_torch():
    code = "import sys; sys.argv = ['corelm', 'backends']; from corelm_cli import main"
    loaded = imported_by(code + "\ntry: main()\nexcept SystemExit: pass")
    assert "typer" in loaded and not loaded & (HEAVY | ENGINES)


@pytest.mark.process
def test_a_mistyped_command_is_refused_before_torch_is_imported(tmp_path):
    asks = tmp_path / "asks.jsonl"
    asks.touch()
    engine = ["--backend", "toy", "--input", str(asks)]
    for typed, said in (
        (["generate", *engine, "--output", "x.csv"], "pandas converts it: read_json(PATH, lines=True)"),
        (["score", *engine, "--output", "x.Parquet"], "only JSON Lines are written"),
        (["generate", *engine, "--output", "-", "--top-p", "3"], "top_p"),
        (["chat", "--backend", "toy", "--temperature", "-1"], "temperature"),
        (["generate", "--backend", "toy", "--input", "none.jsonl", "--output", "-"], "there is no file none.jsonl"),
        (["score", "--backend", "toy", "none.txt"], "there is no file none.txt"),
        (["compare", "--backend", "toy", "--input", "none.jsonl"], "there is no file none.jsonl"),
        (["compare", "--backend", "toy", "--backend", "toy", "--report", "none/x.html"], "folder that does not exist"),
    ):
        code = f"""
import sys
sys.argv = ['corelm', *{typed!r}]
from corelm_cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 2, end.code
loaded = {HEAVY | ENGINES!r} & {{*sys.modules}}
assert not loaded, loaded
"""
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert ended.returncode == 0 and said in ended.stderr, ended.stderr


@pytest.mark.process
def test_an_engine_that_answers_in_records_needs_no_tensordict():
    # Nor what only fleets, hosts and canaries need: importing all of it takes as long as opening a small model.
    code = """
import corelm
with corelm.get_backend("toy") as backend:
    ids = backend.tokenize(["to be"]).ids
    backend.score_logprobs(ids), backend.generate(ids, {"max_new_tokens": 1})
import sys
print(*(name for name in sys.modules if name.startswith(("corelm_fleet", "corelm.containers"))))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
    assert not imported_by(code) & {"tensordict"}


@pytest.mark.process
def test_no_module_but_those_of_plugins_imports_an_engine():
    names = [
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        if not module.name.startswith("corelm_testing.toy")
    ]
    assert {"corelm.policy.policy", "corelm_testing.suite"} <= set(names)
    names = [name for name in names if missing_for(name) is None]
    loaded = imported_by("import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in names))
    assert "torch" in loaded and not loaded & ENGINES


def test_every_public_name_exists():
    missing = [name for name in corelm.__all__ if not hasattr(corelm, name) or name not in dir(corelm)]
    assert not missing and {"get_backend", "list_backends", "LLMPolicy", "History"} <= set(corelm.__all__)


def test_the_public_packages_are_attributes_of_the_first():
    loaded = imported_by("import corelm\nassert issubclass(corelm.errors.InvalidRequestError, ValueError)")
    assert "torch" not in loaded and "torch" in imported_by("import corelm\ncorelm.kl.k3")
    assert not {"errors", "kl"} & set(corelm.__all__)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(corelm, "no_such_name")


@each(
    "name",
    [
        *(
            "corelm.application",
            "corelm.spec",
            "corelm_engine_kit",
            "corelm.containers",
            "corelm.kl",
            "corelm.batching",
        ),
        *("corelm_fleet.hosting", "corelm_fleet", "corelm_testing", "corelm_testing.cassette", "corelm_interop"),
        *("corelm_serve", "corelm_compare"),
    ],
)
def test_every_name_of_a_public_package_exists(name: str):
    if find_spec(name.partition(".")[0]) is None or missing_for(name):
        return
    package = importlib.import_module(name)
    assert package.__all__ and not [each for each in package.__all__ if not hasattr(package, each)]


def test_applications_need_all_that_the_kernel_shows_them():
    nodes = (node for path in (ROOT / "apps").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    taken = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "corelm.application"]
    assert {alias.name for node in taken for alias in node.names} == {
        *importlib.import_module("corelm.application").__all__
    }
