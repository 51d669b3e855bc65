"""Labels of weights that count up, such as ``"3"`` and ``"3+policy@12"``, and runs of them: what they count, and order.

`Weights` and `Adapters` of `corelm.backend` make these labels. A caller may give weights any other label.
"""

from __future__ import annotations

from typing import Any

from corelm.spec.provenance import VersionRuns
from corelm.validate import is_index, shown

#: Longer numbers are no counts: core would not count them up.
_DIGITS = 18


def count_of(version: str) -> int | None:
    """Return the count of the base weights in a label; None for a label that does not count."""
    return _count(version.partition("+")[0])


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
