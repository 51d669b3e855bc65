"""`Connection`: one HTTP request and its reply, on ASGI; and a watch that notices a client that hangs up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from corelm_serve.refusals import Refusal

#: Seconds that a client may take to send its body, and to read what it was sent last.
BODY_TIMEOUT = SEND_TIMEOUT = 60.0
#: Bytes of a refused body that are read and dropped, and seconds for it.
_DRAINED, _DRAIN_TIMEOUT = 64 * 2**20, 5.0


class ClientLeft(Exception):
    """The client has hung up, or its request was dropped, so nothing is sent."""


class Connection:
    """One request and its reply.

    Args:
        send_timeout: seconds that the client may take to read what it was sent last.

    Attributes:
        headers: those of the request.
        left: whether the client has hung up, or does not read.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, send_timeout: float = SEND_TIMEOUT) -> None:
        self.headers = Headers(scope=scope)
        self.left = False
        self._receive, self._send = receive, send
        self._send_timeout = send_timeout
        self._started = self._streams = self._complete = False
        self._on_left: Callable[[], Awaitable[None]] | None = None
        self._leaving: asyncio.Future[None] | None = None

    async def body(self, most: int) -> bytes:
        """Return the body.

        Raises:
            Refusal: the body is larger, is not JSON, or takes too long.
            ClientLeft: the client hangs up before its body is complete.
        """
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A page in a browser cannot send this type to another site without asking that site first.
            raise Refusal(400, f"content-type: expected application/json, got {kind or 'none'}", param="content-type")
        with suppress(ValueError):
            if int(self.headers.get("content-length", "0")) > most:
                raise _too_large(most)
        try:
            return await asyncio.wait_for(self._read(most), BODY_TIMEOUT)
        except TimeoutError:
            late = f"the body did not arrive within {BODY_TIMEOUT:g} s"
            raise Refusal(408, late, code="timeout") from None

    async def _read(self, most: int) -> bytes:
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.left = True
                raise ClientLeft
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
            more = message.get("more_body", False)
        self._complete = True
        return b"".join(parts)

    async def _drain(self) -> bool:
        """Drop what is left of the body, or the client may not read the reply. Return whether nothing is left."""

        async def drop() -> bool:
            size = 0
            while size < _DRAINED:
                message = await self._receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
            return False

        with suppress(asyncio.TimeoutError):
            return self._complete or await asyncio.wait_for(drop(), _DRAIN_TIMEOUT)
        return False

    @asynccontextmanager
    async def watched(self, on_left: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Call `on_left` if the client hangs up in the block. To be entered when the body has been read."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self._hang_up()

        self._on_left = on_left
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            self._on_left = None
            tasks = [watching, *([self._leaving] if self._leaving is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _hang_up(self) -> None:
        if not self.left and self._on_left is not None:
            self._leaving = asyncio.ensure_future(self._on_left())
        self.left = True

    async def reply(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a JSON reply."""
        data = json.dumps(body).encode()
        await self._start(status, {"content-type": "application/json", "content-length": str(len(data))}, headers)
        await self._write(data, more=False)

    async def begin_stream(self, headers: Mapping[str, str]) -> None:
        """Begin a reply of server-sent events."""
        self._streams = True
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8"}, headers)

    async def event(self, data: Any) -> None:
        """Send an event: an object as JSON."""
        await self._write(b"data: " + json.dumps(data).encode() + b"\n\n", more=True)

    async def end_stream(self) -> None:
        """Send the event that ends a stream."""
        await self._write(b"data: [DONE]\n\n", more=False)

    async def fail(self, found: Refusal) -> None:
        """Reply with an error; in a stream that has begun, as its last event."""
        if not self._started:
            close = {} if await self._drain() else {"connection": "close"}
            await self.reply(found.body, found.status, {**found.headers, **close})
        elif self._streams:
            await self._write(b"data: " + json.dumps(found.body).encode() + b"\n\n", more=False)

    async def _start(self, status: int, headers: Mapping[str, str], more: Mapping[str, str] | None) -> None:
        self._started = True
        given = {**headers, "cache-control": "no-store", "x-content-type-options": "nosniff", **(more or {})}
        pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in given.items()]
        await self._deliver({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, data: bytes, *, more: bool) -> None:
        await self._deliver({"type": "http.response.body", "body": data, "more_body": more})

    async def _deliver(self, message: Message) -> None:
        """Send a part of the reply. Nothing is sent to a client that has hung up, or does not read.

        The beginning of a reply may wait as well: until the client has read the reply before it on the same connection.
        """
        if self.left:
            return
        try:
            await asyncio.wait_for(self._send(message), self._send_timeout)
        except (TimeoutError, OSError):
            self._hang_up()


def _too_large(most: int) -> Refusal:
    return Refusal(
        413,
        f"the body is larger than {most} bytes; send less, or start the server with a larger --max-body",
        code="body_too_large",
    )
