"""`Recorder`: records the conformance tests of a run, counts them, and saves them with ``--corelm-report``.

pytest imports this module in every session, so what is heavy is imported where it is used.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from corelm._version import __version__
from corelm_testing.base import NOT_APPLICABLE

#: All outcomes, in the order of the report.
OUTCOMES = ("passed", "failed", "not applicable", "xfailed", "xpassed", "skipped")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one test of one conformance class.

    Attributes:
        suite: the node id of the class.
        backend: the name of the backend.
        theme: one of `THEMES`, or "own".
        test: the name of the test.
        case: the id of its parameters, or "".
        outcome: one of `OUTCOMES`.
        reason: why the test did not simply pass, or "".
        seconds: how long it took.
        difference: the largest difference from a log-prob of the oracle, in nats; None if none was compared.
    """

    suite: str
    backend: str
    theme: str
    test: str
    case: str
    outcome: str
    reason: str
    seconds: float
    difference: float | None = None


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """The results of one conformance class, as the report shows them.

    Attributes:
        suite: the node id of the class.
        backend: the name of the backend.
        engine: the facts that `engine_facts` returned; empty if no test ran.
        findings: the results, sorted by theme and test.
    """

    suite: str
    backend: str
    engine: Mapping[str, Any]
    findings: list[Finding]

    @property
    def name(self) -> str:
        """The name of the backend, or else that of the class."""
        return self.backend or self.suite.rpartition("::")[2]

    @property
    def difference(self) -> float | None:
        """The largest difference from a log-prob of the oracle, in nats; None if none was compared."""
        return max((each.difference for each in self.findings if each.difference is not None), default=None)


def counted(findings: Iterable[Finding]) -> str:
    """Return the counts by outcome, as in ``"41 passed, 3 not applicable"``; `passed` is always included."""
    counts = Counter(finding.outcome for finding in findings)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome] or outcome == "passed")


def promises(suite: SuiteReport) -> Iterator[tuple[str, str, list[Finding]]]:
    """Yield the theme of each test, what it promises, and its cases."""
    for (theme, test), cases in together(suite.findings, place):
        yield theme, test.removeprefix("test_").replace("_", " "), cases


def outcome(cases: list[Finding]) -> str:
    """Return what came of a test's cases, as in ``passed`` or ``"20 passed, 1 not applicable"``."""
    return cases[0].outcome if len(cases) == 1 else counted(cases)


def reasons(cases: list[Finding]) -> list[str]:
    """Return why cases did not simply pass or fail, the first line of each reason."""
    return sorted({case.reason.splitlines()[0] for case in cases if case.reason and case.outcome != "failed"})


def place(finding: Finding) -> tuple[str, str]:
    """Return the theme and the test: the order of a report."""
    return finding.theme, finding.test


def together(findings: Iterable[Finding], key: Callable[[Finding], Any]) -> Iterator[tuple[Any, list[Finding]]]:
    """Yield the findings in groups of equal keys, sorted by them."""
    for value, group in groupby(sorted(findings, key=key), key):
        yield value, list(group)


class Recorder:
    """A pytest plugin that records every conformance test. Under xdist it records in the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._file: str | None = config.getoption("--corelm-report")
        self._is_worker = hasattr(config, "workerinput")
        self._findings: dict[tuple[str, str, str], Finding] = {}
        self._engines: dict[str, Mapping[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        finding = _finding(report)
        if finding is None:
            return
        key = (finding.suite, finding.test, finding.case)
        # Once a phase (set-up, call, tear-down) gave a result, only a failure replaces it.
        if key not in self._findings or finding.outcome == "failed":
            self._findings[key] = finding
        facts: Any = dict(report.user_properties).get("corelm_engine")
        if facts is not None:
            self._engines[finding.suite] = facts

    @property
    def suites(self) -> list[SuiteReport]:
        """The results so far, one entry for each conformance class."""
        return [
            SuiteReport(suite, max(each.backend for each in group), self._engines.get(suite, {}), group)
            for suite, group in together(sorted(self._findings.values(), key=place), lambda finding: finding.suite)
        ]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for suite in self.suites:
            terminalreporter.write_line(
                f"corelm conformance: {counted(suite.findings)} ({suite.suite.rpartition('::')[2]})"
            )
            told = [each for each in suite.findings if each.outcome in ("not applicable", "xfailed")]
            for (outcome, reason), count in Counter((each.outcome, each.reason) for each in told).most_common():
                terminalreporter.write_line(f"  {count} {outcome}: {reason}")

    def pytest_sessionfinish(self) -> None:
        if self._file is None or self._is_worker:
            return
        path = Path(self._file)
        path = path.with_suffix("") if path.suffix in (".json", ".md", ".html") else path
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix, write in ((".json", _json), (".md", _markdown), (".html", _html)):
            path.with_name(path.name + suffix).write_text(write(self.suites), encoding="utf-8")


def _finding(report: pytest.TestReport) -> Finding | None:
    """Return the result of a phase; None for a passed set-up or tear-down, and for tests of other suites."""
    properties: dict[str, Any] = dict(report.user_properties)
    if "corelm_theme" not in properties or (report.when != "call" and report.passed):
        return None
    reason = ""
    if hasattr(report, "wasxfail"):
        outcome, reason = ("xpassed" if report.passed else "xfailed"), report.wasxfail.removeprefix("reason: ")
    elif report.skipped:
        # A skip's representation is (file, line, "Skipped: reason").
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        outcome = "not applicable" if reason.startswith(NOT_APPLICABLE) else "skipped"
        reason = reason.removeprefix(NOT_APPLICABLE)
    else:
        outcome = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = "" if report.passed else crash.message if crash else report.longreprtext
    differences: list[Any] = [value for key, value in report.user_properties if key == "corelm_difference"]
    suite, _, name = report.nodeid.rpartition("::")
    test, _, case = name.partition("[")
    return Finding(
        suite=suite,
        backend=str(properties.get("corelm_backend", "")),
        theme=str(properties["corelm_theme"]),
        test=test,
        case=case.removesuffix("]"),
        outcome=outcome,
        reason=reason,
        seconds=round(report.duration, 3),
        difference=max(differences, default=None),
    )


def _json(suites: list[SuiteReport]) -> str:
    report = {
        "corelm": __version__,
        "python": platform.python_version(),
        "suites": [
            {
                "suite": suite.suite,
                "backend": suite.backend,
                **suite.engine,
                "counts": Counter(finding.outcome for finding in suite.findings),
                "largest_difference": suite.difference,
                "tests": [asdict(finding) for finding in suite.findings],
            }
            for suite in suites
        ],
    }
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


def _markdown(suites: list[SuiteReport]) -> str:
    """Return a Markdown section per suite: the counts, then a table with one row per test for all cases."""
    lines: list[str] = []
    for suite in suites:
        lines += [f"### Conformance of `{suite.name}`", ""]
        lines += [f"core {__version__}, Python {platform.python_version()}: {counted(suite.findings)}.", ""]
        lines += ["| theme | promise | result |", "|---|---|---|"]
        for theme, promise, cases in promises(suite):
            result = ": ".join(filter(None, (outcome(cases), ", ".join(reasons(cases))))).replace("|", "\\|")
            lines.append(f"| {theme} | {promise} | {result} |")
        lines.append("")
    return "\n".join(lines)


def _html(suites: list[SuiteReport]) -> str:
    """Return a page that a browser shows without a network."""
    from jinja2 import Environment

    page = (files(__package__) / "report.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(page)
    functions = {each.__name__.strip("_"): each for each in (counted, outcome, promises, reasons, _declared)}
    return template.render(suites=suites, core=__version__, python=platform.python_version(), **functions)


def _declared(suite: SuiteReport) -> Iterator[tuple[str, str]]:
    """Yield what the engine can do, and in one line what it cannot."""
    absent = []
    for name, value in suite.engine.get("declares", {}).items():
        if value is False or value in (0, [], {}):
            absent.append(name)
        elif name == "sampling":
            spans = (each if span is None else f"{each} {span[0]:g} to {span[1]:g}" for each, span in value.items())
            yield name, ", ".join(spans)
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value))
        else:
            yield name, "yes" if value is True else "not said" if value is None else str(value)
    if absent:
        yield "not declared", ", ".join(absent)
