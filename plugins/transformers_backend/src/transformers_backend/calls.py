"""`Calls`: the requests under way, whose rows another thread may abort."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor

from corelm.spec import Deadline, GenerateRequest, ScoreRequest
from transformers_backend.in_flight import CallUpdates


class Aborted(Exception):
    """All rows of the request were aborted."""


class Call:
    """One request under way.

    Attributes:
        deadline: the time that it has left.
        aborted: the numbers of its aborted rows. Other threads add to them.
        updates: lets new weights in between two steps, and knows which tokens are of which; None for a call that lets
            none in.
    """

    def __init__(self, request: GenerateRequest | ScoreRequest, updates: CallUpdates | None = None) -> None:
        self.updates = updates
        self.deadline = Deadline(request.timeout)
        self.aborted: set[int] = set()
        self._names = request.request_ids

    def abort(self, names: Collection[str]) -> None:
        """Note that the rows with these names were aborted."""
        self.aborted.update([row for row, name in enumerate(self._names) if name in names])

    def check_wanted(self) -> None:
        """Raise `Aborted` if all rows were aborted."""
        if len(self.aborted) == len(self._names):
            raise Aborted

    def aborted_among(self, rows: Tensor) -> set[int]:
        """Return which of these rows, int64[n], were aborted: their places in `rows`."""
        if not self.aborted:
            return set()
        return {place for place, row in enumerate(rows.tolist()) if row in self.aborted}


class Calls:
    """The requests under way. There may be one inside another, made by a wrapper of a hook."""

    def __init__(self) -> None:
        self._under_way: list[Call] = []

    @contextmanager
    def start(self, request: GenerateRequest | ScoreRequest, updates: CallUpdates | None = None) -> Iterator[Call]:
        """Yield the call of this request. Inside, `abort` reaches it."""
        call = Call(request, updates)
        self._under_way.append(call)
        try:
            yield call
        finally:
            self._under_way.remove(call)

    @property
    def under_way(self) -> bool:
        """Whether there is any."""
        return bool(self._under_way)

    def abort(self, names: Collection[str]) -> None:
        """Abort the rows with these names. They end when their call looks next, after a decoding step for example."""
        for call in list(self._under_way):
            call.abort(names)
