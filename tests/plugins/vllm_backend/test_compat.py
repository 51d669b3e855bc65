"""Versions of vLLM: the table of needed names is complete, and the exceptions of each version are found."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import vllm_backend
from helpers.vllm_names import NEEDED
from vllm_backend.compat import refusals


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of everything that is imported from vLLM, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found = [(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        else:
            continue
        yield from (each for each in found if each[0].partition(".")[0] == "vllm")


def test_the_table_of_needed_names_lists_every_import_of_the_plugin() -> None:
    found = defaultdict(set)
    for path in Path(vllm_backend.__path__[0]).rglob("*.py"):
        for module, name in imports(ast.parse(path.read_text(encoding="utf-8"))):
            found[module].add(name)
    assert found == NEEDED


class Old(ValueError):
    """A parameter that vLLM 0.26 refuses."""


class Client(Exception):
    """A row that vLLM 0.32 refuses."""


class Full(Exception):
    """A row that vLLM 0.32 has no room for."""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"VLLMValidationError": Old}, (ValueError,)),
        ({"VLLMClientError": Client}, (Client,)),
        ({"VLLMClientError": Client, "GracefulHTTPError": Full}, (Client, Full)),
    ],
)
def test_the_exceptions_with_which_a_version_refuses_a_row(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, type[Exception]], expected: tuple[type[Exception], ...]
) -> None:
    package, exceptions = ModuleType("vllm"), ModuleType("vllm.exceptions")
    vars(exceptions).update(names)
    vars(package)["exceptions"] = exceptions
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    refusals.cache_clear()
    try:
        assert refusals() == expected
    finally:
        refusals.cache_clear()
