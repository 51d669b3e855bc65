"""The pytest plugin of core: a marker, ``--corelm-report``, and the check that no standard test is missing.

pytest loads it in every session of an environment in which core is installed: keep it light, do not import torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from corelm.errors import CapabilityError
from corelm_testing.base import NOT_APPLICABLE, NOT_SHOWN, ConformanceBase
from corelm_testing.cassette.file import NotRecordedError
from corelm_testing.cassette.fixture import MODES, Cassettes
from corelm_testing.report import Recorder

#: The name of the check that is added to every conformance class.
META_TEST = "test_every_standard_test_is_there"

#: Whether a test has run to its end and has not failed. An expected failure counts as passed.
_PASSED = pytest.StashKey[bool]()

_KIT = ConformanceBase.__module__.rpartition(".")[0] + "."


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("corelm").addoption(
        "--corelm-report",
        metavar="FILE",
        help="write the results of the conformance tests to FILE.json and, as a table for a README, to FILE.md",
    )
    parser.getgroup("corelm").addoption(
        "--corelm-record-mode",
        choices=MODES,
        default="once",
        help="what the fixture cassette does: none replays; once, the default, replays what is there and records the "
        "rest; new_episodes opens the engine and adds calls that are not recorded; all records again",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "corelm_needs(*names): a conformance test that applies to backends of these capabilities only"
    )
    config.addinivalue_line(
        "markers",
        "corelm_cassette(match_seeds, save_tokenizer, path): how the fixture cassette records and plays",
    )
    config.pluginmanager.register(Recorder(config), "corelm-recorder")


@pytest.fixture
def cassette(request: pytest.FixtureRequest) -> Iterator[Cassettes]:
    """Open engines that are recorded when the test runs for the first time, and replayed from then on."""
    settings: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers("corelm_cassette"))):
        settings.update(mark.kwargs)
    mode = request.config.getoption("--corelm-record-mode")
    cassettes = Cassettes.of_test(request.node, mode, **settings)
    yield cassettes
    cassettes.close(failed=not request.node.stash.get(_PASSED, False))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    found = call.excinfo
    if found is not None and isinstance(item.parent, ConformanceClass) and call.when != "teardown":
        outcome = _instead_of(found.value, item.parent.obj.not_shown)
        if outcome is not None:
            call.excinfo = pytest.ExceptionInfo.from_exc_info((type(outcome), outcome, found.tb))
    # A test that was interrupted gets no report.
    report = yield
    item.stash[_PASSED] = report.when == "call" and not report.failed
    return report


def _instead_of(error: BaseException, not_shown: Mapping[str, str]) -> BaseException | None:
    """Return what a test of the kit ends with instead of an error; None if it fails."""
    if isinstance(error, NotRecordedError):
        # The backend is a cassette that does not hold the calls of this test.
        return pytest.skip.Exception(f"{NOT_APPLICABLE}its calls are not recorded")
    if isinstance(error, CapabilityError):
        # Every engine is asked for some parameters, without a declaration. The suite may say why this one refuses them.
        from corelm.spec.sampling import EVERY_ENGINE

        name = str(error.capability)
        if name in EVERY_ENGINE and name in not_shown:
            return pytest.xfail.Exception(f"{NOT_SHOWN}{name}: {not_shown[name]}")
    return None


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
                theme = "own" if owner is None else owner.corelm_theme
                item.user_properties.append(("corelm_theme", theme))
                # `-k streaming` runs the whole theme, and not only the tests that have the word in their names.
                item.extra_keyword_matches.add(theme)
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
