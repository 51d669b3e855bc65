"""`CallUpdates`: new weights for a model that is sampling, between two steps of its loop."""

from __future__ import annotations

from torch import Tensor

from corelm.spec import GenerateRequest, VersionRuns
from corelm_engine_kit import RowVersions, VersionLog


class CallUpdates:
    """What a call that samples has to do with updates.

    Args:
        log: the weights that the model has.
        request: the request of the call.
        rereads: whether rows are read again with new weights, so that no keys and values of old ones are left.

    Attributes:
        changes: how often the weights were others than before, in the course of the call.
    """

    def __init__(self, log: VersionLog, request: GenerateRequest, *, rereads: bool) -> None:
        self.changes = 0
        self._log, self._request, self._rereads = log, request, rereads
        self._version, self._number = log.now(request), log.number
        self._rows = RowVersions(len(request.prompts), self._version)

    def came_in(self) -> bool:
        """Look for updates before the model reads tokens; return whether the rows in it have to be read again."""
        if self._log.number == self._number:
            return False
        self._version, self._number = self._log.now(self._request), self._log.number
        self.changes += 1
        return self._rereads

    def sampled(self, rows: Tensor, first: int) -> None:
        """Note that rows get their token `first`, from logits that were computed since the last `came_in`.

        Args:
            rows: int64[n], rows of the request.
            first: the position of the token in the answer.
        """
        if self.changes:
            for row in rows.tolist():
                self._rows.sampled(row, first, self._version)

    @property
    def runs(self) -> tuple[VersionRuns, ...]:
        """The `version_runs` of the result."""
        return self._rows.runs
