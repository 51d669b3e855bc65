"""`InFlight`: the ids by which an engine knows the requests in flight."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class InFlight:
    """Gives every request an id that no other request has, and finds it by the caller's name while the request runs.

    The names of requests are unique within one call only. If an engine knew requests by them, a reply to an earlier
    call could pass for the reply to a later one, and an abort could end a request that began after it. Any number of
    threads may use this at once.

    >>> in_flight = InFlight()
    >>> with in_flight.named(["a", "b"]) as ids:
    ...     in_flight.ids(["a", "unknown"]) == ids[:1]
    True
    >>> in_flight.ids(["a"])
    []
    """

    def __init__(self) -> None:
        self._ids: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def named(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Yield a new id for each name: 32 hexadecimal digits. `ids` finds them until the ``with`` block ends."""
        ids = [uuid.uuid4().hex for _ in names]
        with self._lock:
            for name, request_id in zip(names, ids, strict=True):
                self._ids.setdefault(name, set()).add(request_id)
        try:
            yield ids
        finally:
            with self._lock:
                for name, request_id in zip(names, ids, strict=True):
                    self._ids[name].discard(request_id)
                    if not self._ids[name]:
                        del self._ids[name]

    def ids(self, names: Iterable[str]) -> list[str]:
        """Return the ids of the requests in flight with these names. Several requests may share a name."""
        with self._lock:
            return [request_id for name in dict.fromkeys(names) for request_id in self._ids.get(name, ())]
