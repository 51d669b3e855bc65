"""`UpdateGate` and `CallUpdates`: new weights for a model that is sampling, between two steps of its loop.

The thread that works with the model holds the gate. A call that samples opens it before each step: an update, and the
canary that asks before and after it, go through. They come one after another, on the thread of the update, so whatever
a guest has changed of the model (its mode, its adapters) is put back when the loop goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from corelm.spec import GenerateRequest, VersionRuns
from corelm_engine_kit import RowVersions, VersionLog


class UpdateGate:
    """Lets one thread at a time work with the model. A thread that holds it may enter again.

    Attributes:
        waiting: how many threads wait to be let in.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._depth = 0
        self._open: list[int] = []
        self.waiting = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the gate inside. Wait until its holder opens it, or has left."""
        me = threading.get_ident()
        with self._changed:
            if self._holder != me:
                self.waiting += 1
                try:
                    self._changed.wait_for(lambda: self._holder is None)
                    self._holder = me
                finally:
                    self.waiting -= 1
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                # An interrupt may have ended `open` before it held the gate again.
                if self._holder == me:
                    self._depth -= 1
                    if not self._depth:
                        self._holder = None
                        self._changed.notify_all()

    def open(self) -> None:
        """Let those through who wait, if any do, and hold the gate again."""
        if not self.waiting:
            return
        me = threading.get_ident()
        with self._changed:
            depth, self._depth, self._holder = self._depth, 0, None
            # Who came through last goes on first: each puts back what it has changed of the model.
            self._open.append(me)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._holder and not self.waiting and self._open[-1] == me)
                self._depth, self._holder = depth, me
            finally:
                self._open.remove(me)


class CallUpdates:
    """What a call that samples has to do with updates.

    Args:
        gate: the gate of the model.
        log: the weights that the model has.
        request: the request of the call.
        rereads: whether rows are read again with new weights, so that no keys and values of old ones are left.

    Attributes:
        changes: how often the weights were others than before, in the course of the call.
    """

    def __init__(self, gate: UpdateGate, log: VersionLog, request: GenerateRequest, *, rereads: bool) -> None:
        self.changes = 0
        self._gate, self._log, self._request, self._rereads = gate, log, request, rereads
        self._version, self._number = log.now(request), log.number
        self._rows = RowVersions(len(request.prompts), self._version)

    def let_in(self) -> bool:
        """Let updates in before the model reads tokens; return whether the rows in the model have to be read again."""
        self._gate.open()
        if self._log.number == self._number:
            return False
        self._version, self._number = self._log.now(self._request), self._log.number
        self.changes += 1
        return self._rereads

    def sampled(self, rows: Tensor, places: Tensor, first: int) -> None:
        """Note that rows got their token `first`, from logits that were computed since the last `let_in`.

        Args:
            rows: int64[n], rows of the request.
            places: int64[k], which of them.
            first: the position of the token in the answer.
        """
        if self.changes:
            for row in rows[places].tolist():
                self._rows.sampled(row, first, self._version)

    @property
    def runs(self) -> tuple[VersionRuns, ...]:
        """The `version_runs` of the result."""
        return self._rows.runs
