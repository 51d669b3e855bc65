"""`Finding`, the result of one conformance test, and `SuiteReport`, those of one class; how they are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

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
