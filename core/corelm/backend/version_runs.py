"""Which weights sampled which tokens of a row, after updates in flight: check it, and give the weights other names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from corelm.errors import EngineError
from corelm.spec.provenance import VersionRuns
from corelm.spec.records import GenerateResult
from corelm.spec.version_labels import run_problems
from corelm.tensors.ragged import Ragged
from corelm.validate import shown


def check_runs(batch: GenerateResult, fail: Callable[[str], EngineError]) -> None:
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


def versions_of(batch: GenerateResult, default: str, name: Callable[[str], str]) -> GenerateResult:
    """Return a checked result with the names of the weights of its rows, under other names.

    Args:
        default: the name of all weights of a result that says nothing.
        name: returns the other name.
    """
    if batch.version_runs is not None:
        return with_runs(batch, [renamed(runs, name) for runs in batch.version_runs])
    if batch.weight_versions is not None:
        return replace(batch, weight_versions=tuple(map(name, batch.weight_versions)))
    return replace(batch, weight_versions=(default,) * len(batch.ids))
