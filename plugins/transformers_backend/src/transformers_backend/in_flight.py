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

from corelm.spec import GenerateRequest
from corelm.spec.provenance import VersionRuns
from corelm.support import RowVersions, VersionLog


class UpdateGate:
    """Lets one thread at a time work with the model. A thread that holds it may enter again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._depth = 0
        self._waiting = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the gate inside. Wait until its holder opens it, or has left."""
        me = threading.get_ident()
        with self._changed:
            if self._holder != me:
                self._waiting += 1
                try:
                    self._changed.wait_for(lambda: self._holder is None)
                    self._holder = me
                finally:
                    self._waiting -= 1
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
        if not self._waiting:
            return
        with self._changed:
            depth, self._depth, self._holder = self._depth, 0, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._holder is None and not self._waiting)
            self._depth, self._holder = depth, threading.get_ident()


class CallUpdates:
    """What a call that samples has to do with updates.

    Args:
        gate: the gate of the model.
        log: the weights that the model has.
        request: the request of the call.
        rereads: whether rows are read again with new weights, so that no keys and values of old ones are left.

    Attributes:
        seen: whether there was an update in the course of the call.
    """

    def __init__(self, gate: UpdateGate, log: VersionLog, request: GenerateRequest, *, rereads: bool) -> None:
        self.seen = False
        self._gate, self._log, self._request, self._rereads = gate, log, request, rereads
        self._version = log.now(request)
        self._rows = RowVersions(len(request.prompts), self._version)

    def let_in(self) -> bool:
        """Let updates in before the model reads tokens; return whether the rows in the model have to be read again."""
        self._gate.open()
        before, self._version = self._version, self._log.now(self._request)
        if self._version == before:
            return False
        self.seen = True
        return self._rereads

    def sampled(self, rows: Tensor, first: int) -> None:
        """Note that these rows of the request got token `first`, from logits computed since the last `let_in`."""
        if self.seen:
            for row in rows.tolist():
                self._rows.sampled(row, first, self._version)

    @property
    def runs(self) -> tuple[VersionRuns, ...]:
        """The `version_runs` of the result."""
        return self._rows.runs
