"""The pytest plugin of core: a marker, ``--corelm-report``, and the check that no standard test is missing.

pytest loads it in every session of an environment in which core is installed: keep it light, do not import torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corelm.testing.base import ConformanceBase
from corelm.testing.report import Recorder

#: The name of the check that is added to every conformance class.
META_TEST = "test_every_standard_test_is_there"

_KIT = ConformanceBase.__module__.rpartition(".")[0] + "."


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("corelm").addoption(
        "--corelm-report",
        metavar="FILE",
        help="write the results of the conformance tests to FILE.json and, as a table for a README, to FILE.md",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "corelm_needs(*names): a conformance test that applies to backends of these capabilities only"
    )
    config.pluginmanager.register(Recorder(config), "corelm-recorder")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> pytest.Class | None:
    if inspect.isclass(obj) and issubclass(obj, ConformanceBase) and collector.istestclass(obj, name):
        return ConformanceClass.from_parent(collector, name=name, obj=obj)
    return None


class ConformanceClass(pytest.Class):
    """Collects the tests of a conformance class, and one more that checks that they are complete."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        standard = standard_tests(self.obj)
        for item in super().collect():
            if isinstance(item, pytest.Function):
                owner = standard.get(item.originalname)
                theme = "own" if owner is None else owner.__module__.removeprefix(_KIT)
                item.user_properties.append(("corelm_theme", theme))
            yield item
        check: pytest.Item = StandardTests.from_parent(self, name=META_TEST)
        check.user_properties.append(("corelm_theme", "kit"))
        yield check


class StandardTests(pytest.Item):
    """Fails if the class deletes or overrides a standard test, unless the override is an xfail that says why."""

    def runtest(self) -> None:
        assert isinstance(self.parent, ConformanceClass)
        faults = changed_tests(self.parent.obj)
        if faults:
            pytest.fail(
                "standard tests must not be removed. If the backend cannot pass a test yet, override the test, mark it "
                "@pytest.mark.xfail(reason='...') and call super():\n  " + "\n  ".join(faults),
                pytrace=False,
            )

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.nodeid.replace("::", ".")


def standard_tests(cls: type[Any]) -> dict[str, type[Any]]:
    """Return the standard tests that `cls` inherits, each with the class of the kit that defines it."""
    kit = [owner for owner in cls.__mro__ if owner.__module__.startswith(_KIT)]
    return {name: owner for owner in reversed(kit) for name in vars(owner) if name.startswith("test_")}


def changed_tests(cls: type[Any]) -> list[str]:
    """Return, for each standard test that `cls` deletes or overrides without an xfail, what is wrong."""
    faults = []
    for name, owner in sorted(standard_tests(cls).items()):
        found = next(c for c in cls.__mro__ if name in vars(c))
        if found is owner:
            continue
        test = vars(found)[name]
        if not callable(test):
            faults.append(f"{name} is deleted by {found.__qualname__}")
        elif not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in getattr(test, "pytestmark", ())):
            faults.append(f"{name} is overridden by {found.__qualname__} without an xfail with a reason")
    return faults
