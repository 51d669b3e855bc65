"""Which weights sampled which tokens: the labels that a server has given its weights, and what core calls these.

The server says in each reply which of its labels were in force, and from which token on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from corelm.spec import GenerateRequest, VersionRuns, WeightUpdate
from corelm_engine_kit import RowError


class _Entry(NamedTuple):
    """Weights that the server has had: its name for them, and the update that brought them, with core's name."""

    label: str
    number: int = 0
    version: str = ""


class WeightHistory:
    """The labels that a server has given its weights since the backend was opened, in their order."""

    def __init__(self, label: str) -> None:
        # Only ever appended to, as calls read it while weights are updated.
        self._entries = [_Entry(label)]
        self._first_known = 0
        self._used = {label}

    def new_label(self, version: str) -> str:
        """Return a label for new weights: `version`, made unique if the server has had it before.

        If a label were used twice, rows of the earlier weights could pass for rows of the new ones.
        """
        while version in self._used:
            version += "'"
        self._used.add(version)
        return version

    def note(self, label: str, update: WeightUpdate) -> None:
        """Take note that the server has weights of this label, before it samples with them."""
        self._entries.append(_Entry(label, update.number, update.version))

    def lose_track(self) -> None:
        """Take note that the server has weights without a label. Rows that it has sampled from now on fail."""
        self._first_known = len(self._entries)

    def of_call(self, request: GenerateRequest) -> WeightsOfCall:
        """Return the weights that a call may be sampled with, which begins now."""
        return WeightsOfCall(self, len(self._entries) - 1, request)

    def since(self, number: int) -> Sequence[_Entry]:
        """Return the weights from this number on whose rows can be told apart."""
        return self._entries[max(number, self._first_known) :]


class WeightsOfCall:
    """The weights that the rows of one call may have. The first are those in force when it began."""

    def __init__(self, history: WeightHistory, first: int, request: GenerateRequest) -> None:
        self._history, self._first, self._request = history, first, request

    @property
    def before(self) -> VersionRuns:
        """The runs of a row without tokens."""
        known = self._history.since(self._first)
        return ((self._version(known[0]) if known else self._request.weight_version or "", 0),)

    def runs(self, meta: Any, count: int) -> VersionRuns:
        """Return the `version_runs` of the first `count` tokens of a row.

        Raises:
            RowError: the row has weights that this backend did not load while the call ran, or the server does not say
                which tokens are of which of them.
        """
        known = self._history.since(self._first)
        ours, spans = [entry.label for entry in known], meta.get("weight_versions") or []
        check_labels(meta, ours)
        if len(known) == 1:
            return ((self._version(known[0]), 0),)
        ends = [int(span["end"]) for span in spans]
        starts = [int(span["start"]) for span in spans]
        if not spans or starts != [0, *ends[:-1]] or sorted(ends) != ends or ends[-1] < count:
            raise RowError(f"weights were updated while it was answered; its weight_versions {spans} do not say where")
        found: list[tuple[str, int]] = []
        for span, start in zip(spans, starts, strict=True):
            version = self._version(known[ours.index(str(span["version"]))])
            if (start < count or not found) and (not found or found[-1][0] != version):
                found.append((version, start))
        return tuple(found)

    def _version(self, entry: _Entry) -> str:
        """Return what core calls these weights: what it called them in its request, unless they came after that."""
        return entry.version if entry.number > self._request.weight_update else self._request.weight_version or ""


def check_labels(meta: Any, ours: Sequence[str]) -> None:
    """Raise a `RowError` unless the weights that a reply names are ours, and in our order."""
    spans = [str(span["version"]) for span in meta.get("weight_versions") or []]
    theirs = {str(meta.get("weight_version")), *spans}
    if not theirs <= {*ours} or spans != sorted(spans, key=ours.index):
        named = " and ".join(map(repr, ours)) or "weights without a label"
        raise RowError(
            f"the server answers with weights {' and '.join(sorted(map(repr, theirs)))}, but {named} are in force: it "
            "was restarted, or another client has updated it; load the weights again"
        )
