"""The report of the conformance tests as JSON, and as Markdown for a README. As HTML: `report_html`."""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import asdict

from corelm._version import __version__
from corelm_testing.findings import SuiteReport, counted, outcome, promises, reasons


def as_json(suites: list[SuiteReport]) -> str:
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


def as_markdown(suites: list[SuiteReport]) -> str:
    """Return a Markdown section per suite: the counts, then a table with one row per test, all cases combined."""
    lines: list[str] = []
    for suite in suites:
        lines += [f"### Conformance of `{suite.backend or suite.suite.rpartition('::')[2]}`", ""]
        lines += [f"core {__version__}, Python {platform.python_version()}: {counted(suite.findings)}.", ""]
        lines += ["| theme | promise | result |", "|---|---|---|"]
        for theme, promise, cases in promises(suite):
            result = ": ".join(filter(None, (outcome(cases), ", ".join(reasons(cases))))).replace("|", "\\|")
            lines.append(f"| {theme} | {promise} | {result} |")
        lines.append("")
    return "\n".join(lines)
