"""`Aborts`: a thread that ends requests in the engine. Ending them may take long, so no other work waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from corelm.errors import brief, described

_log = logging.getLogger(__name__)

#: Seconds after which a request that is still under way is aborted again.
_AGAIN = 0.1


class Aborts:
    """Ends requests in the engine. While one call to the engine is under way, further names wait and share the next.

    An abort that reaches the engine before its request does is lost, so it is repeated until the request has ended.

    Args:
        abort: ends the requests with these names.
        name: the name of the backend.

    Attributes:
        thread: the thread that ends requests; None while there are none.
    """

    def __init__(self, abort: Callable[[tuple[str, ...]], object], name: str) -> None:
        self._abort, self._name = abort, name
        self._lock = threading.RLock()
        self._added = threading.Event()
        self._requests: list[tuple[tuple[str, ...], Callable[[], bool]]] = []
        self.thread: threading.Thread | None = None

    def add(self, names: Iterable[str], under_way: Callable[[], bool]) -> None:
        """End the requests with these names, soon and on another thread.

        Args:
            under_way: returns whether their call has not ended yet.
        """
        names = tuple(names)
        _log.info("%s: aborting %d requests", self._name, len(names))
        with self._lock:
            self._requests.append((names, under_way))
            self._added.set()
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name=f"corelm-{self._name}-abort", daemon=True)
                try:
                    self.thread.start()
                except RuntimeError:
                    # The system has no room for a thread: the requests go on, and their answers are dropped.
                    self.thread, self._requests = None, []

    def _run(self) -> None:
        while True:
            with self._lock:
                self._added.clear()
                self._requests = [request for request in self._requests if request[1]()]
                requests = list(self._requests)
                if not requests:
                    self.thread = None
                    return
            names = tuple(name for each, _ in requests for name in each)
            try:
                self._abort(names)
            except BaseException as error:
                # These requests then go on, and their answers are dropped.
                _log.info("%s: aborting %d requests failed: %s", self._name, len(names), brief(described(error)))
                with self._lock:
                    self._requests = [request for request in self._requests if request not in requests]
            self._added.wait(_AGAIN)
