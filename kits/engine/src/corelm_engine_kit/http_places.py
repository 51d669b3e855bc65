"""`Places`: how many requests of a client are at a server at a time."""

from __future__ import annotations

import asyncio
import logging

from corelm.validate import count

try:
    import resource
except ImportError:
    # Windows, which has no limit of this kind.
    resource = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

#: Requests at a time unless a limit is given. The server queues what it cannot work on yet.
MOST = 4096
#: File descriptors that are left to the rest of the program, but at most half of them.
_SPARE = 256


class Places:
    """Places for requests at a server: ``async with places:`` waits for one and holds it.

    Args:
        limit: the number of places; None for `MOST`, or fewer if this process may not open as many connections.
        where: the URL of the server, for the log.

    Raises:
        InvalidRequestError: `limit` is not a positive integer; `field` is ``max_in_flight``.
    """

    def __init__(self, limit: int | None, where: str) -> None:
        self.limit = most_places() if limit is None else count("max_in_flight", limit, 1)
        self._free = asyncio.Semaphore(self.limit)
        self._told = False
        self._where, self._level, self._advice = where, logging.INFO, "give max_in_flight= a larger number to send more"
        if limit is None and self.limit < MOST:
            # A limit that no one has chosen is told even if the program has not set up logging.
            self._level, self._advice = logging.WARNING, "raise this process's limit of open files (ulimit -n)"

    async def __aenter__(self) -> None:
        if self._free.locked() and not self._told:
            self._told = True
            told = "%s: requests wait in this process while %d are at the server; %s"
            _log.log(self._level, told, self._where, self.limit, self._advice)
        await self._free.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self._free.release()


def most_places() -> int:
    """Return how many requests may be under way where no limit is given.

    Each takes a connection, which is a file descriptor of this process.
    """
    if resource is None:
        return MOST
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MOST
    return max(1, min(MOST, descriptors - min(_SPARE, descriptors // 2)))
