"""The report of the conformance tests as JSON, as Markdown for a README, and as HTML."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files

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


def as_html(suites: list[SuiteReport]) -> str:
    """Return a page that a browser shows without a network."""
    # Only here: pytest imports this module in every session.
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
