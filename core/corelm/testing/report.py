"""The results of the conformance tests: counted at the end of a run, and saved with ``--corelm-report``."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from corelm._version import __version__
from corelm.testing.base import NOT_APPLICABLE

#: All outcomes, in the order of the report.
OUTCOMES = ("passed", "failed", "not applicable", "xfailed", "xpassed", "skipped")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one test of one conformance class.

    Attributes:
        suite: the node id of the class.
        backend: the name of the backend.
        theme: the module of the kit that defines the test, or "own".
        test: the name of the test.
        case: the id of its parameters, or "".
        outcome: one of `OUTCOMES`.
        reason: why the test did not simply pass, or "".
        seconds: how long it took.
    """

    suite: str
    backend: str
    theme: str
    test: str
    case: str
    outcome: str
    reason: str
    seconds: float


class Recorder:
    """A pytest plugin that records every conformance test. Under xdist it records in the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._file: str | None = config.getoption("--corelm-report")
        self._is_worker = hasattr(config, "workerinput")
        self._findings: dict[tuple[str, str, str], Finding] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        finding = _finding(report)
        if finding is None:
            return
        key = (finding.suite, finding.test, finding.case)
        # Once a phase (set-up, call, tear-down) gave a result, only a failure replaces it.
        if key not in self._findings or finding.outcome == "failed":
            self._findings[key] = finding

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for suite, findings in _by_suite(self._findings.values()):
            terminalreporter.write_line(f"corelm conformance: {counted(findings)} ({suite.rpartition('::')[2]})")

    def pytest_sessionfinish(self) -> None:
        if self._file is None or self._is_worker:
            return
        path = Path(self._file)
        path = path.with_suffix("") if path.suffix in (".json", ".md") else path
        path.parent.mkdir(parents=True, exist_ok=True)
        findings = list(self._findings.values())
        path.with_name(path.name + ".json").write_text(as_json(findings), encoding="utf-8")
        path.with_name(path.name + ".md").write_text(as_markdown(findings), encoding="utf-8")


def _finding(report: pytest.TestReport) -> Finding | None:
    """Return the result of a phase of a test; None for a passed set-up or tear-down and for tests of other suites."""
    properties = dict(report.user_properties)
    if "corelm_theme" not in properties or (report.when != "call" and report.passed):
        return None
    reason = ""
    if hasattr(report, "wasxfail"):
        outcome, reason = ("xpassed" if report.passed else "xfailed"), report.wasxfail
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
    )


def counted(findings: Iterable[Finding]) -> str:
    """Return the counts by outcome, as in ``"41 passed, 3 not applicable"``; `passed` is always included."""
    counts = Counter(finding.outcome for finding in findings)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome] or outcome == "passed")


def as_json(findings: list[Finding]) -> str:
    report = {
        "corelm": __version__,
        "python": platform.python_version(),
        "suites": [
            {
                "suite": suite,
                "backend": max(finding.backend for finding in group),
                "counts": Counter(finding.outcome for finding in group),
                "tests": [asdict(finding) for finding in group],
            }
            for suite, group in _by_suite(findings)
        ],
    }
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


def as_markdown(findings: list[Finding]) -> str:
    """Return a Markdown section per suite: the counts, then a table with one row per test, all cases combined."""
    lines: list[str] = []
    for suite, group in _by_suite(findings):
        backend = max(finding.backend for finding in group) or suite.rpartition("::")[2]
        lines += [f"### Conformance of `{backend}`", ""]
        lines += [f"core {__version__}, Python {platform.python_version()}: {counted(group)}.", ""]
        lines += ["| theme | promise | result |", "|---|---|---|"]
        for (theme, test), cases in _together(group, lambda finding: (finding.theme, finding.test)):
            lines.append(f"| {theme} | {test.removeprefix('test_').replace('_', ' ')} | {_result(cases)} |")
        lines.append("")
    return "\n".join(lines)


def _result(cases: list[Finding]) -> str:
    reasons = sorted({case.reason.splitlines()[0] for case in cases if case.reason and case.outcome != "failed"})
    result = cases[0].outcome if len(cases) == 1 else counted(cases)
    return f"{result}: {', '.join(reasons)}".replace("|", "\\|") if reasons else result


def _by_suite(findings: Iterable[Finding]) -> list[tuple[str, list[Finding]]]:
    return list(_together(findings, lambda finding: finding.suite))


def _together(findings: Iterable[Finding], key: Any) -> Iterator[tuple[Any, list[Finding]]]:
    for value, group in groupby(sorted(findings, key=key), key):
        yield value, list(group)
