"""The report of the conformance tests as one HTML file, which a browser shows without a network."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from corelm._version import __version__
from corelm_testing.findings import Finding, SuiteReport, counted, outcome, promises, reasons

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-top: 1.5rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25rem .6rem; }
td small { display: block; opacity: .7; }
tr { border-bottom: 1px solid #8884; } td:nth-child(n + 3) { white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dt { opacity: .7; } dd { margin: 0; }
code { overflow-wrap: anywhere; } pre { white-space: pre-wrap; opacity: .85; margin: .3rem 0; }
.outcome { border-radius: .3rem; padding: .05rem .45rem; white-space: nowrap; }
.passed { background: #2e9e4f33; } .failed { background: #d6303055; font-weight: 600; }
.expected { background: #d69a3044; }
.absent { opacity: .6; }
"""


def as_html(suites: list[SuiteReport]) -> str:
    """Return the page: for each suite the engine, what it declares, and a table of what was promised and found."""
    body = "".join(part for suite in suites for part in _suite(suite))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Conformance</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><h1>Conformance</h1><p>core {escape(__version__)}, Python {platform.python_version()}. The kit is "
        f"described in docs/conformance.md.</p>{body}</body></html>\n"
    )


def _suite(suite: SuiteReport) -> Iterator[str]:
    yield f"<h2>{escape(suite.backend or suite.suite.rpartition('::')[2])}</h2>\n<dl>"
    yield _fact("result", counted(suite.findings))
    for name in ("software", "model"):
        if suite.engine.get(name):
            yield _fact(name, str(suite.engine[name]))
    if suite.difference is not None:
        yield _fact("largest difference", f"{suite.difference:.2g} nats from the oracle's log-probs")
    yield f"</dl>\n<h3>What it declares</h3>\n<dl>{_declared(suite.engine.get('declares', {}))}</dl>\n"
    yield "<h3>What was found</h3>\n<table><tr><th>theme</th><th>promise</th><th>nats</th><th>result</th></tr>\n"
    for theme, promise, cases in promises(suite):
        apart = max((case.difference for case in cases if case.difference is not None), default=None)
        yield (
            f"<tr><td>{escape(theme)}</td><td>{escape(promise)}{_told(cases)}</td>"
            f"<td>{'' if apart is None else f'{apart:.1g}'}</td>"
            f'<td><span class="outcome {_class(cases)}">{escape(outcome(cases))}</span></td></tr>\n'
        )
    yield "</table>\n"


def _fact(name: str, value: str) -> str:
    return f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>\n"


def _declared(capabilities: Mapping[str, Any]) -> str:
    """Return what the engine can do, and in one line what it cannot."""
    lines, absent = [], []
    for name, value in capabilities.items():
        if value is False or value in (0, [], {}):
            absent.append(name)
        elif name == "sampling":
            spans = (each if span is None else f"{each} {span[0]:g} to {span[1]:g}" for each, span in value.items())
            lines.append(_fact(name, ", ".join(spans)))
        elif isinstance(value, list):
            lines.append(_fact(name, ", ".join(map(str, value))))
        else:
            lines.append(_fact(name, "yes" if value is True else "not said" if value is None else str(value)))
    return "".join(lines) + (_fact("not declared", ", ".join(absent)) if absent else "")


def _told(cases: list[Finding]) -> str:
    """Return why cases did not pass."""
    failed = (f"{case.case}: {case.reason}".removeprefix(": ") for case in cases if case.outcome == "failed")
    lines = "".join(f"<small>{escape(each)}</small>" for each in reasons(cases))
    return lines + "".join(f"<pre>{escape(each)}</pre>" for each in failed)


def _class(cases: list[Finding]) -> str:
    outcomes = {case.outcome for case in cases}
    if outcomes & {"failed", "xpassed"}:
        return "failed"
    if "xfailed" in outcomes:
        return "expected"
    return "passed" if "passed" in outcomes else "absent"
