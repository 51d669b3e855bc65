"""`Recorder`: records the conformance tests of a run, counts them, and saves them with ``--corelm-report``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from corelm_testing.base import NOT_APPLICABLE
from corelm_testing.findings import Finding, SuiteReport, counted, place, together
from corelm_testing.report_formats import as_html, as_json, as_markdown


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
        found = together(self._findings.values(), lambda finding: finding.suite)
        return [
            SuiteReport(
                suite, max(each.backend for each in group), self._engines.get(suite, {}), sorted(group, key=place)
            )
            for suite, group in found
        ]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for suite in self.suites:
            terminalreporter.write_line(
                f"corelm conformance: {counted(suite.findings)} ({suite.suite.rpartition('::')[2]})"
            )
            reasons = Counter(each.reason for each in suite.findings if each.outcome == "not applicable")
            for reason, count in reasons.most_common():
                terminalreporter.write_line(f"  {count} not applicable: {reason}")

    def pytest_sessionfinish(self) -> None:
        if self._file is None or self._is_worker:
            return
        path = Path(self._file)
        path = path.with_suffix("") if path.suffix in (".json", ".md", ".html") else path
        path.parent.mkdir(parents=True, exist_ok=True)
        suites = self.suites
        for suffix, text in ((".json", as_json(suites)), (".md", as_markdown(suites)), (".html", as_html(suites))):
            path.with_name(path.name + suffix).write_text(text, encoding="utf-8")


def _finding(report: pytest.TestReport) -> Finding | None:
    """Return the result of a phase; None for a passed set-up or tear-down, and for tests of other suites."""
    properties: dict[str, Any] = dict(report.user_properties)
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
