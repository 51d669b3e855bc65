"""`ServerWatch`: tells a server that takes long to answer from one that hangs.

A server sends nothing until an answer is complete, so silence on a connection says nothing. While requests have been
unanswered for long, the watch asks the server on another connection whether it makes progress. Bytes of any reply
are progress, too.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from corelm.errors import BackendTimeoutError, CoreLMError, InvalidRequestError
from corelm_engine_kit.http_errors import AccessError

T = TypeVar("T")

#: The server is asked this often within the stall timeout, and at least every so many seconds.
_ASKED, _LONGEST_WAIT = 4, 30.0
#: Seconds of silence before the system asks whether the other end of a connection is still there, seconds between two
#: such questions, and how many may stay without an answer. Routers forget silent connections after a few minutes.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressProbe:
    """What `HttpClient` asks a server that takes long to answer.

    Attributes:
        rows: the path of the requests that the engine works on.
        page: the page to ask while only such requests are unanswered.
        progress: ``progress(text)`` returns the part of the page that changes while the engine works, or None if the
            page has no such part. Without `progress`, the page answers only if the engine works, so any answer counts.
        alive: the page to ask while another request, such as one to load weights, is unanswered, and where `page` is
            missing or has no such part. Any answer counts.
    """

    rows: str
    page: str
    progress: Callable[[str], Hashable | None] | None = None
    alive: str


class ServerWatch:
    """Fails requests to a server that has made no progress for `stall_timeout` seconds. Runs on one event loop.

    It runs only while there are requests, and asks nothing before one has been unanswered for `stall_timeout` seconds.
    So a request to a server that hangs fails after about twice that time.

    Args:
        probe: what to ask.
        stall_timeout: seconds.
        ask: gets a page and returns its text, or raises a `CoreLMError`.
    """

    def __init__(self, probe: ProgressProbe, stall_timeout: float, ask: Callable[[str], Awaitable[str]]) -> None:
        self._probe, self._stall_timeout, self._ask = probe, stall_timeout, ask
        self._requests: set[_Request] = set()
        self._task: asyncio.Task[None] | None = None
        self._last_progress = 0.0
        self._seen: Hashable | None = None

    async def over(self, where: str, path: str, reply: Awaitable[T]) -> T:
        """Return the reply to a request that has just been made.

        Args:
            where: the request, for the message.
            path: its path.
            reply: sends the request and returns the reply.

        Raises:
            BackendTimeoutError: the server hangs.
        """
        request = _Request(path)
        self._requests.add(request)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            return await reply
        except asyncio.CancelledError:
            if not request.failed:
                raise
            message = f"{where}: the server hangs; it gave no answer and made no progress for {self._stall_timeout:g} s"
            raise BackendTimeoutError(message) from None
        finally:
            self._requests.discard(request)
            if not self._requests and self._task is not None:
                self._task.cancel()
                self._task = None

    def note(self) -> None:
        """Take it for progress that bytes have arrived."""
        self._last_progress = time.monotonic()

    async def _run(self) -> None:
        while True:
            oldest = min((request.since for request in self._requests), default=time.monotonic())
            await asyncio.sleep(oldest + self._stall_timeout - time.monotonic())
            await self._patrol()

    async def _patrol(self) -> None:
        """Ask for progress while requests are late. If there is none for another `stall_timeout`, fail these."""
        self._seen = None
        self.note()
        while late := [each for each in self._requests if each.since + self._stall_timeout <= time.monotonic()]:
            left = self._last_progress + self._stall_timeout - time.monotonic()
            if left <= 0:
                for request in late:
                    request.fail()
                    self._requests.discard(request)
                return
            if await self._makes_progress(left):
                self.note()
            left = self._last_progress + self._stall_timeout - time.monotonic()
            await asyncio.sleep(min(left, self._stall_timeout / _ASKED, _LONGEST_WAIT))

    async def _makes_progress(self, timeout: float) -> bool:
        try:
            return await asyncio.wait_for(self._is_at_work(), timeout)
        except (TimeoutError, CoreLMError):
            return False

    async def _is_at_work(self) -> bool:
        if all(request.path == self._probe.rows for request in self._requests):
            try:
                text = await self._ask(self._probe.page)
                if self._probe.progress is None:
                    return True
                progress = self._probe.progress(text)
            except (InvalidRequestError, AccessError):
                # The server, or a proxy before it, does not have the page.
                progress = None
            if progress is not None:
                before, self._seen = self._seen, progress
                # The first look is there to compare with.
                return before is not None and before != progress
        await self._ask(self._probe.alive)
        return True


class _Request:
    """A request that the current task has made.

    Attributes:
        path: its path.
        since: when it was made, by `time.monotonic`.
        failed: whether the watch has ended it.
    """

    def __init__(self, path: str) -> None:
        self.path, self.since, self.failed = path, time.monotonic(), False
        self._task = asyncio.current_task()

    def fail(self) -> None:
        assert self._task is not None
        self.failed = True
        self._task.cancel()


async def keep_alive(event: str, info: Mapping[str, Any]) -> None:
    """Have the system notice that a silent connection is lost. A ``trace`` of httpx2: told of everything it does."""
    if event != "connection.connect_tcp.complete":
        return
    connection = info["return_value"].get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        # Not every system has all of them.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
