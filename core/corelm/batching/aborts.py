"""`Aborts`: a thread that ends requests in the engine. Ending them may take long, so no other work waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from corelm.errors import described

_log = logging.getLogger(__name__)


class Aborts:
    """Ends requests in the engine. While one call to the engine is under way, further names wait and share the next.

    Args:
        abort: ends the requests with these names.
        name: the name of the thread, which runs only while there is something to end.
    """

    def __init__(self, abort: Callable[[tuple[str, ...]], object], name: str) -> None:
        self._abort, self._name = abort, name
        self._lock = threading.RLock()
        self._names: list[str] = []
        self._thread: threading.Thread | None = None

    @property
    def thread(self) -> threading.Thread | None:
        return self._thread

    def add(self, names: Iterable[str]) -> None:
        """End the requests with these names, soon and on another thread."""
        with self._lock:
            self._names += names
            if self._names and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    # The system has no room for a thread: the requests go on, and their answers are dropped.
                    self._thread, self._names = None, []

    def join(self, timeout: float | None) -> None:
        """Wait until there is nothing more to end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                names, self._names = tuple(self._names), []
                if not names:
                    self._thread = None
                    return
            try:
                self._abort(names)
            except BaseException as error:
                # These requests then go on, and their answers are dropped.
                _log.info("aborting %d requests failed: %s", len(names), described(error))
