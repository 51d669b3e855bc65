"""`Exchange`: one request that is being answered; `Endpoint`: reads requests, answers them, refuses wrong ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from corelm_serve.connection import ClientLeft, Connection
from corelm_serve.generation import Call
from corelm_serve.refusals import Refusal, refusal
from corelm_serve.requests import Ask, parsed
from corelm_serve.service import Service

#: The header of a request that is not to be recorded: one that tries the server out.
NOT_RECORDED = ("X-Session-Record", "no")


A = TypeVar("A", bound=Ask)
C = TypeVar("C", bound=Call[Any])


class Exchange:
    """One request and the calls that are made for it.

    Attributes:
        session: the session that the client names, or None.
        store: where the request is recorded; None if it is not.
    """

    def __init__(self, service: Service, connection: Connection) -> None:
        self.service, self.connection = service, connection
        self.session = connection.headers.get("x-session-id")
        recorded = connection.headers.get(NOT_RECORDED[0].lower()) != NOT_RECORDED[1]
        self.store = service.store if recorded else None
        self._calls: list[Call[Any]] = []

    def add(self, call: C) -> C:
        """Return a call, which from now on ends with the request."""
        self.refuse_if_over()
        self._calls.append(call)
        return call

    def refuse_if_over(self) -> None:
        """Stop here if the client has hung up, or the server ends.

        Raises:
            ClientLeft: it is over.
        """
        if self.connection.left or self.service.ending:
            raise ClientLeft

    async def leave(self, *, at_once: bool = False) -> None:
        """End the calls, because the client has hung up or the server ends."""
        await asyncio.gather(*(call.leave(at_once=at_once) for call in self._calls))


class Endpoint(Generic[A]):
    """An ASGI application for one kind of request.

    Args:
        service: the engine and what the server knows.
        read: checks a body.
        answer: answers a request.
        prompt: what the request calls its prompt.
    """

    def __init__(
        self,
        service: Service,
        read: Callable[[Mapping[str, Any]], A],
        answer: Callable[[Exchange, A], Awaitable[None]],
        prompt: str,
    ) -> None:
        self._service, self._read, self._answer, self._prompt = service, read, answer, prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, connection = self._service, Connection(scope, receive, send)
        given: dict[str, Any] = {}
        try:
            with service.admitted():
                given = parsed(await connection.body(service.options.max_body))
                ask = self._read(given)
                service.check_model(ask.model)
                ask = replace(ask, sampling=service.with_stop_ids(ask.sampling))
                exchange = Exchange(service, connection)
                with service.open(exchange.leave):
                    async with connection.watched(exchange.leave):
                        await self._answer(exchange, ask)
        except ClientLeft:
            if service.ending and not connection.left:
                ends = Refusal(503, "the server is shutting down", type="server_error", code="closed")
                await connection.fail(ends)
        except Exception as error:
            await connection.fail(refusal(error, self._prompt, given))
