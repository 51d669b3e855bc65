"""`VersionLog`: what a plugin with `updates_in_flight` remembers, to say which weights sampled which token."""

from __future__ import annotations

from corelm.spec import GenerateRequest, VersionRuns, WeightUpdate


class VersionLog:
    """The weights that an engine has, under the labels that core gives them.

    `note` every update of the base weights that has changed something, also one that failed half-way, before a token is
    sampled with them. Ask `now` when the logits of a token are computed.
    """

    def __init__(self) -> None:
        self._last = (0, "")

    @property
    def number(self) -> int:
        """The number of the last update that was noted; 0 before the first."""
        return self._last[0]

    def note(self, update: WeightUpdate) -> None:
        """Take note that the engine has these weights, or, after a failure, part of them."""
        self._last = (update.number, update.version)

    def now(self, request: GenerateRequest) -> str:
        """Return the label of the weights as they are now.

        Args:
            request: the call that asks. An update may have come after core made its request, and before the plugin sees
                it: the number of the update tells.
        """
        number, version = self._last
        return version if number > request.weight_update else request.weight_version or ""


class RowVersions:
    """Collects the `version_runs` of the rows of a call.

    Tell it of the tokens of a row when the weights they were sampled with are known; rows whose tokens are all of the
    first version need no call.

    Args:
        rows: how many rows the call has.
        version: the label of the weights when it begins.
    """

    def __init__(self, rows: int, version: str) -> None:
        self._first = version
        self._runs: list[list[tuple[str, int]]] = [[(version, 0)] for _ in range(rows)]

    def sampled(self, row: int, first: int, version: str) -> None:
        """Note that the tokens of a row are of this version from token `first` on; 0 discards earlier notes."""
        runs = self._runs[row]
        if first == 0:
            runs.clear()
        if not runs or runs[-1][0] != version:
            runs.append((version, first))

    @property
    def runs(self) -> tuple[VersionRuns, ...]:
        """The `version_runs` of a result."""
        return tuple(map(tuple, self._runs))
