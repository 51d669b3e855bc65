"""`StrictPlayer`: the recorded calls, in their order, each only for a request that equals the recorded one."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from corelm.spec import Adapter
from corelm_testing.cassette.difference import difference
from corelm_testing.cassette.errors import NotRecordedError
from corelm_testing.cassette.index import CassetteIndex, Played
from corelm_testing.cassette.weights import WeightsHistory


class StrictPlayer:
    """Plays the calls of a cassette one after another. A call that is refused can be made again, as it was recorded.

    Args:
        path: the folder of the cassette, for messages.
        index: its calls.
        seeds: whether seeds must be equal.

    Attributes:
        weights: the updates so far.
    """

    def __init__(self, path: Path, index: CassetteIndex, *, seeds: bool = True) -> None:
        self._path, self._index, self._seeds = path, index, seeds
        # Core refuses a call that needs gradients before it gets here.
        self._calls = [call for call in index.calls if not call.gradients]
        self.weights = WeightsHistory()
        self._next = 0
        self._mutex = threading.Lock()

    @property
    def left(self) -> int:
        """How many calls have not been played."""
        return len(self._calls) - self._next

    def play(self, hook: str, request: Any, adapter: Adapter = None) -> list[Played]:
        """Return the next recorded call, if it is this one.

        Args:
            request: see `request_json`.
            adapter: the adapter of the call, which is part of the request as well.

        Raises:
            NotRecordedError: it is another one, or the last one was played; it names the call and the first difference.
        """
        with self._mutex:
            calls = self._calls
            if self._next == len(calls):
                after = f"ends after {len(calls)} calls" if calls else "holds no calls"
                raise NotRecordedError(
                    f"cassette {self._path}: it {after}, and another one was made, {hook}. {self._remedy()}"
                )
            due = calls[self._next]
            if due.hook != hook:
                raise NotRecordedError(
                    f"cassette {self._path}, call {due.number}: recorded was {due.hook}, and {hook} was called. "
                    + self._remedy(),
                    call=due.number,
                    field="hook",
                )
            recorded = self._index.read(due)
            for name in (name for name in recorded.request if name != "seeds" or self._seeds):
                if recorded.request[name] != request.get(name):
                    self._refuse(due.number, hook, name, recorded.request[name], request.get(name))
            self._next += 1
            return [Played(recorded)]

    def _refuse(self, number: int, hook: str, name: str, recorded: Any, given: Any) -> None:
        row, what = difference(recorded, given)
        where = name if row is None else f"{name}, row {row}"
        hint = _HINTS.get(name, "")
        raise NotRecordedError(
            f"cassette {self._path}, call {number} ({hook}): another request was recorded. First difference: {where}: "
            f"{what}. {hint}{self._remedy()}",
            call=number,
            field=name,
            problems={} if row is None else {row: f"{name}: {what}"},
        )

    def _remedy(self) -> str:
        return (
            "Make the recorded calls in their order; if only their order or their batches differ, pass "
            f"match='content'; or record again: CassetteRecorder({os.fspath(self._path)!r}, record_mode='all')"
        )


_HINTS = {
    "seeds": "Pass the same seed= to both runs, or torch.manual_seed if a call has none. ",
    "weights": "The run has computed other weights than the recorded one. ",
}
