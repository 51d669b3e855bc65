"""What importing core imports, seen from a fresh interpreter."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import corelm

ENGINES = {"transformers", "vllm", "sglang", "peft", "transformers_backend", "toy_backend"}
HEAVY = {"torch", "tensordict", "numpy"}


def imported_by(code: str) -> set[str]:
    """The top-level names of all modules that are loaded after `code` has run."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


def test_importing_core_is_light():
    assert not imported_by("import corelm; dir(corelm)") & (HEAVY | ENGINES)


def test_the_registry_is_light():
    assert not imported_by("import corelm.backend.registry") & (HEAVY | ENGINES)


def test_the_command_lists_backends_without_torch():
    code = "import sys; sys.argv = ['corelm', 'backends']; from corelm.cli import main"
    loaded = imported_by(code + "\ntry: main()\nexcept SystemExit: pass")
    assert "typer" in loaded and not loaded & (HEAVY | ENGINES)


def test_what_pytest_loads_in_every_session_is_light():
    assert not imported_by("import corelm.testing.plugin") & (HEAVY | ENGINES)


def test_no_module_of_core_imports_an_engine():
    names = [module.name for module in pkgutil.walk_packages(corelm.__path__, "corelm.")]
    assert {"corelm.policy.policy", "corelm.testing.suite"} <= set(names)
    loaded = imported_by("import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in names))
    assert "torch" in loaded and not loaded & ENGINES


def test_every_public_name_is_there():
    missing = [name for name in corelm.__all__ if not hasattr(corelm, name) or name not in dir(corelm)]
    assert not missing and {"get_backend", "list_backends", "LLMPolicy", "History"} <= set(corelm.__all__)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(corelm, "no_such_name")


@pytest.mark.parametrize("name", ["corelm.spec", "corelm.support", "corelm.containers", "corelm.kl", "corelm.batching"])
def test_every_name_of_a_public_package_is_there(name: str):
    package = importlib.import_module(name)
    assert package.__all__ and not [each for each in package.__all__ if not hasattr(package, each)]
