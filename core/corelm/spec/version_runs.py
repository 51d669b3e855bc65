"""Labels of weights that count up, such as ``"3"`` and ``"3+policy@12"``, and `version_runs`: which weights sampled
which tokens of a row. A caller may give weights any other label, from which later weights count: ``"step-1+2"``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from corelm.spec.provenance import VersionRuns
from corelm.spec.records import GenerateResult
from corelm.tensors.ragged import Ragged
from corelm.validate import is_index, shown

#: A label of base weights or of an adapter: a number, or the name that a caller gave and how often they have changed
#: since. Longer numbers are part of the name.
_COUNT = r"(?:([0-9]{1,18})|(.+?)(?:\+([1-9][0-9]{0,17}))?)"
_LABEL = re.compile(rf"{_COUNT}(?:\+none|\+([^@]+)@{_COUNT})?", re.DOTALL)


class Counts(NamedTuple):
    """What a label counts: (name, number) of the base weights and of the adapter. Only equal names can be compared.

    The name is None if the label is a number. `adapter` is the adapter's own name, "" without one.
    """

    base: tuple[str | None, int]
    adapter: str
    own: tuple[str | None, int]


def counts_of(version: str) -> Counts:
    """Return what a label counts.

    >>> tuple(counts_of("3")), tuple(counts_of("tuned+2+policy@12"))
    (((None, 3), '', (None, 0)), (('tuned', 2), 'policy', (None, 12)))
    """
    found = _LABEL.fullmatch(version)
    number, name, later, adapter, *own = found.groups() if found else (None, version, *[None] * 5)
    return Counts(_count(number, name, later), adapter or "", _count(*own))


def counted_up(version: str) -> str:
    """Return the label that follows.

    >>> counted_up("3"), counted_up("tuned"), counted_up("tuned+1")
    ('4', 'tuned+1', 'tuned+2')
    """
    found = re.fullmatch(_COUNT, version, re.DOTALL)
    name, number = _count(*found.groups()) if found else (version, 0)
    return str(number + 1) if name is None else f"{name}+{number + 1}"


def _count(number: str | None, name: str | None, later: str | None) -> tuple[str | None, int]:
    return name, int(number or later or 0)


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
    for (before, _), (version, first) in pairwise(runs):
        last, now = counts_of(before), counts_of(version)
        # Another adapter counts apart, and so do labels of another name.
        back = now.base[0] == last.base[0] and now.base < last.base
        if back or ((now.adapter, now.own[0]) == (last.adapter, last.own[0]) and now.own < last.own):
            return f"the weights go back from {before} to {version} at position {first}"
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
