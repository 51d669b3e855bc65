"""What importing core loads, seen from a new interpreter; and which private names the packages use."""

import ast
import functools
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import corelm
from helpers.each import each
from helpers.extras import missing_for
from helpers.third_party_names import THIRD_PARTY

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
HEAVY = {"torch", "tensordict", "numpy"}
#: Functions that take the name of an attribute.
READ_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


def imported_by(code: str) -> set[str]:
    """Return the top-level names of all modules that a new interpreter has loaded after running `code`."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.process
def test_importing_core_is_light():
    assert not imported_by("import corelm; dir(corelm)") & (HEAVY | ENGINES)


@pytest.mark.process
def test_the_registry_is_light():
    assert not imported_by("import corelm.backend.registry") & (HEAVY | ENGINES)


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
        (["generate", *engine, "--output", "x.csv"], "only JSON Lines are written"),
        (["score", *engine, "--output", "x.Parquet"], "only JSON Lines are written"),
        (["generate", *engine, "--output", "-", "--top-p", "3"], "top_p"),
        (["chat", "--backend", "toy", "--temperature", "-1"], "temperature"),
        (["generate", "--backend", "toy", "--input", "none.jsonl", "--output", "-"], "there is no file none.jsonl"),
        (["score", "--backend", "toy", "none.txt"], "there is no file none.txt"),
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
def test_the_pytest_plugin_is_light():
    assert not imported_by("import corelm_testing.plugin") & (HEAVY | ENGINES)


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


ROOT = Path(__file__).parent.parent
#: Folders that hold packages. In corelm, every folder and every module at the top counts as a package.
SOURCES = [ROOT / "core", *sorted(ROOT.glob("[kpa]*/*/src"))]
#: Known uses of another package's private names, as "file: name". Each is to be removed; add none.
KNOWN_USES: set[str] = set()


class Module:
    """A parsed module of this repository.

    Attributes:
        file: its path in the repository.
        package: the package whose private names it may use, such as ``corelm.batching``. A module directly in corelm is
            a package of its own.
        defined: the private names that it defines: functions, classes, variables, methods and attributes.
    """

    def __init__(self, path: Path, source: Path) -> None:
        parts = path.relative_to(source).with_suffix("").parts
        self.file = path.relative_to(ROOT).as_posix()
        self.package = ".".join(parts[: 2 if parts[0] == "corelm" else 1])
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.defined = set(self._definitions())

    def _definitions(self) -> Iterator[str]:
        inherited = {alias.asname or alias.name for alias in self._imported_from_elsewhere()}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from filter(is_private, [node.name])
            if isinstance(node, (ast.Module, ast.ClassDef)):
                names = (each.id for each in top_level_names(node))
                yield from filter(is_private, names)
            # A class that sets an attribute of a parent from another package does not define it.
            if isinstance(node, ast.ClassDef) and not inherited & {ast.unparse(base) for base in node.bases}:
                yield from (each.attr for each in ast.walk(node) if is_own(each) and isinstance(each.ctx, ast.Store))

    def _imported_from_elsewhere(self) -> Iterator[ast.alias]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not within(node.module, self.package):
                yield from node.names

    def uses(self) -> Iterator[tuple[str, str | None]]:
        """Yield every private name that is used but not defined here, and the module it is imported from, if any."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.file}: relative import"
                module = node.module or ""
                yield from ((alias.name, module) for alias in node.names if is_private(alias.name))
                yield from ((part, module) for part in module.split(".") if is_private(part))
            elif isinstance(node, ast.Import):
                parts = ((part, alias.name) for alias in node.names for part in alias.name.split("."))
                yield from ((part, module) for part, module in parts if is_private(part))
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node):
                yield node.attr, None
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in READ_BY_NAME:
                name = node.args[1] if len(node.args) > 1 else None
                if isinstance(name, ast.Constant) and is_private(str(name.value)):
                    yield str(name.value), None


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def is_own(node: ast.AST) -> bool:
    """Return whether the node is a private attribute of ``self``, ``cls`` or ``super()``."""
    owners = ("self", "cls", "super()")
    return isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in owners


def top_level_names(body: ast.Module | ast.ClassDef) -> Iterator[ast.Name]:
    """Yield the names that the statements of a module or class assign to."""
    for statement in body.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from (name for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name))


def within(module: str, package: str) -> bool:
    """Return whether the module belongs to the package."""
    return f"{module}.".startswith(f"{package}.")


def foreign_uses(modules: list[Module]) -> Iterator[str]:
    """Yield, as "file: name", the uses of private names of other packages."""
    for module in modules:
        own = {name for other in modules if other.package == module.package for name in other.defined}
        for name, origin in module.uses():
            if origin == "corelm._version":
                # The version belongs to corelm as a whole.
                continue
            if name in own if origin is None else within(origin, module.package):
                continue
            if f"{module.package}: {name}" not in THIRD_PARTY:
                yield f"{module.file}: {name}"


@functools.cache
def all_modules() -> list[Module]:
    files = [(path, source) for source in SOURCES for path in sorted(source.rglob("*.py"))]
    files += [(path, ROOT) for folder in ("benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [Module(path, source) for path, source in files]


def test_no_package_uses_a_private_name_of_another():
    modules = all_modules()
    assert {"corelm.batching", "corelm.errors", "vllm_backend", "benchmarks"} <= {each.package for each in modules}
    assert set(foreign_uses(modules)) == KNOWN_USES, "use public names; for other libraries see THIRD_PARTY"


def test_every_private_name_of_another_library_is_still_used():
    used = {f"{module.package}: {name}" for module in all_modules() for name, _ in module.uses()}
    assert not THIRD_PARTY.keys() - used


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from corelm.one.part import _helper", "_helper"),
        ("import corelm.one\ncorelm.one._helper()", "_helper"),
        ("def f(thing): return thing._field", "_field"),
        ("def f(thing): return getattr(thing, '_field')", "_field"),
        ("from corelm.one import Thing\nclass Mine(Thing):\n def f(self, other): self._field = other._field", "_field"),
        ("def f(thing): return thing._of_another_library", "_of_another_library"),
        ("from corelm._version import __version__", None),
        ("class Mine:\n def f(self, other): self._mine = other._mine", None),
        ("from corelm.two.part import _also_mine", None),
    ],
)
def test_the_check_finds_private_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, found: str | None):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    folders = [tmp_path / "corelm" / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "part.py").write_text("def _helper(): ...\nclass Thing:\n def __init__(self): self._field = 1")
    (folders[1] / "module.py").write_text(code)
    modules = [Module(path, tmp_path) for path in sorted(tmp_path.rglob("*.py"))]
    assert set(foreign_uses(modules)) == (set() if found is None else {f"corelm/two/module.py: {found}"})
