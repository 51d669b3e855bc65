"""Versions of vLLM: the exceptions of each are found."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from vllm_backend.compat import refusals


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
