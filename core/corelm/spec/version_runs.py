"""Labels of weights that count up, such as ``"3"`` and ``"3+policy@12"``, and `version_runs`: which weights sampled
which tokens of a row. A caller may give weights any other label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from corelm.spec.provenance import VersionRuns
from corelm.spec.records import GenerateResult
from corelm.tensors.ragged import Ragged
from corelm.validate import is_index, shown

#: Longer numbers are no counts: core would not count them up.
_DIGITS = 18


def counts_of(version: str) -> tuple[int, str, int] | None:
    """Return what a label counts: the base weights, the name of the adapter ("" without one), and its versions.

    >>> counts_of("3"), counts_of("3+none"), counts_of("3+policy@12"), counts_of("tuned")
    ((3, '', 0), (3, '', 0), (3, 'policy', 12), None)
    """
    base, _, adapter = version.partition("+")
    name, _, number = adapter.partition("@")
    counts = _count(base), _count(number) if number else 0
    if counts[0] is None or counts[1] is None:
        return None
    return counts[0], name if number else "", counts[1]


def counted_up(version: str) -> str:
    """Return the label that follows.

    >>> counted_up("3"), counted_up("tuned")
    ('4', 'tuned+1')
    """
    # A label that the caller has chosen need not be a number, or may be longer than Python reads.
    return str(int(version) + 1) if version.isdecimal() and len(version) <= _DIGITS else f"{version}+1"


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else None


def run_problems(runs: Any, length: int) -> str:
    """Return what is wrong with the runs of a row of `length` tokens; "" if nothing is."""
    if not isinstance(runs, (tuple, list)) or not runs:
        return f"expected ((version, first token), ...), got {shown(runs)}"
    last = -1
    for place, run in enumerate(runs):
        if not isinstance(run, (tuple, list)) or len(run) != 2 or not isinstance(run[0], str) or not is_index(run[1]):
            return f"run {place}: expected (version, first token), got {shown(run)}"
        first = int(run[1])
        if place == 0 and first != 0:
            return f"run 0 begins at position {first}; the first token is 0"
        if place and first <= last:
            return f"run {place} begins at position {first}, but run {place - 1} at {last}; runs ascend"
        if place and first >= length:
            return f"run {place} begins at position {first}, but the row has {length} tokens"
        last = first
    return ""


def backward(runs: VersionRuns) -> str:
    """Return where the weights of a row go backwards, if their labels count; "" if they do not."""
    last, before = None, ""
    for version, first in runs:
        counts = counts_of(version)
        # Another adapter counts apart.
        if last and counts and (counts[0] < last[0] or (counts[1] == last[1] and counts[2] < last[2])):
            return f"the weights go back from {before} to {version} at position {first}"
        last, before = counts, version
    return ""


def check_runs(batch: GenerateResult, fail: Callable[[str], Exception]) -> None:
    """Check the `version_runs` of a result, of which nothing else was checked yet."""
    if batch.version_runs is None:
        return
    if not isinstance(batch.ids, Ragged):
        raise fail(f"ids are a {type(batch.ids).__name__}, expected a Ragged")
    rows, lengths = batch.version_runs, batch.ids.lengths.tolist()
    if not isinstance(rows, (tuple, list)) or len(rows) != len(lengths):
        raise fail(f"returned version_runs {shown(rows)} for {len(lengths)} rows")
    for row, (runs, length) in enumerate(zip(rows, lengths, strict=True)):
        if problem := run_problems(runs, length):
            raise fail(f"row {row}: version_runs: {problem}")
        if batch.weight_versions is not None and tuple(batch.weight_versions)[row : row + 1] != (runs[0][0],):
            raise fail(f"row {row}: weight_versions and the first of version_runs differ; leave weight_versions out")


def renamed(runs: VersionRuns, name: Callable[[str], str]) -> VersionRuns:
    """Return runs whose weights have other names. Neighbours that then have the same name become one run.

    >>> renamed((("0", 0), ("1", 4), ("2", 9)), {"0": "0", "1": "2", "2": "2"}.__getitem__)
    (('0', 0), ('2', 4))
    """
    found: list[tuple[str, int]] = []
    for version, first in runs:
        if not found or found[-1][0] != name(version):
            found.append((name(version), int(first)))
    return tuple(found)


def with_runs(batch: GenerateResult, runs: Sequence[VersionRuns]) -> GenerateResult:
    """Return the result with these runs, one row each; without runs if each row is of one version."""
    several = any(len(row) > 1 for row in runs)
    return replace(
        batch,
        weight_versions=tuple(row[0][0] for row in runs),
        version_runs=tuple(runs) if several else None,
    )
