"""Where the log-probs of a row came from whose tokens several answers sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from corelm.spec.provenance import Provenance, VersionRuns


class SampledPart(NamedTuple):
    """The tokens of a row that one answer sampled.

    Attributes:
        provenance: that of the answer; None if it is not known.
        start: the position of its first token in the row.
        stop: the position after its last token; `start` for an answer without tokens.
    """

    provenance: Provenance | None
    start: int
    stop: int


def disagreement(parts: Sequence[SampledPart]) -> str:
    """Return the distributions of the parts if their log-probs may not stand in one row, else ""."""
    known = [part.provenance for part in parts if part.provenance is not None]
    if all(one.matches(known[0]) for one in known):
        return ""
    return ", ".join(f"{one.mode} at temperature {one.temperature} ({one.support})" for one in known)


def provenance_of_parts(parts: Sequence[SampledPart]) -> Provenance | None:
    """Return the provenance of a row: that of its last answer, with the versions of all weights that sampled the row.

    Args:
        parts: in order; their distributions agree.

    Returns:
        None if the provenance of a part is not known, or if there are no parts.
    """
    known = [part.provenance for part in parts if part.provenance is not None]
    if not known or len(known) < len(parts):
        return None
    # An answer that was aborted before its first token is of no weights.
    sampled = [one for part, one in zip(parts, known, strict=True) if part.start < part.stop] or known[-1:]
    versions = dict.fromkeys(one.weight_version for one in sampled)
    return replace(known[-1], weight_version=", ".join(versions), version_runs=_runs(parts, known))


def _runs(parts: Sequence[SampledPart], known: Sequence[Provenance]) -> VersionRuns:
    """Return which weights sampled the tokens of a row, from the first token of its first answer on; () if all one."""
    found: list[tuple[str, int]] = []
    for part, one in zip(parts, known, strict=True):
        if part.start == part.stop:
            continue
        before = part.start - parts[0].start
        for version, first in one.version_runs or ((one.weight_version, 0),):
            # A part may be the beginning of an answer.
            if part.start + first < part.stop and (not found or found[-1][0] != version):
                # Runs begin at 0: what is before the first sampled token belongs to no weights, and is counted with it.
                found.append((version, before + first if found else 0))
    return tuple(found) if len(found) > 1 else ()
