"""`Endpoint` reads requests and answers them; an `Exchange` is one request under way, and a `Reply` its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from corelm_interop.openai_answers import Answer
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


class Reply:
    """The reply to one request.

    Args:
        prefix: what the id of the reply begins with.
        turns: of sessions, one for each prompt. The reply names the session if there is only one.
        include_usage: whether a stream ends with the usage.
    """

    def __init__(self, exchange: Exchange, prefix: str, turns: Iterable[Any], *, include_usage: bool = False) -> None:
        self.exchange, self.service, self.connection = exchange, exchange.service, exchange.connection
        self._include_usage = include_usage
        self._heading = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": exchange.service.name,
            # The protocol's name of what tells one state of a server from another: here, of its weights.
            "system_fingerprint": f"weights-{exchange.service.backend.weight_version}",
        }
        names = {turn.session_id for turn in turns}
        session = names.pop() if len(names) == 1 else None
        self._headers = {} if session is None else {"x-session-id": session}

    async def whole(self, kind: str, choices: Sequence[Any], numbers: Mapping[str, int]) -> None:
        """Send all choices at once."""
        body = {**self._heading, "object": kind, "choices": choices, "usage": numbers}
        await self.connection.reply(body, headers=self._headers)

    async def begin_stream(self) -> None:
        """Begin a reply of events."""
        await self.connection.begin_stream(self._headers)

    async def event(self, kind: str, choices: Sequence[Any], numbers: Mapping[str, int] | None = None) -> None:
        """Send choices as an event; `numbers` are None except at the end, and left out if the client wants none."""
        more = {"usage": numbers} if self._include_usage else {}
        await self.connection.event({**self._heading, "object": kind, "choices": choices, **more})

    async def end_stream(self, kind: str, numbers: Mapping[str, int]) -> None:
        """End a reply of events, with the usage if the client wants it."""
        if self._include_usage:
            await self.event(kind, [], numbers)
        await self.connection.end_stream()


def usage(prompts: Iterable[Sequence[int]], answers: Iterable[Answer]) -> dict[str, int]:
    """Return how many tokens the prompts and the answers have."""
    read, sampled = sum(map(len, prompts)), sum(len(answer.ids) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def record(turn: Any, prompt: Sequence[int], answers: Sequence[Answer], messages: Sequence[Any] = ()) -> None:
    """Record the answers to one prompt, but not those that were aborted before the first token."""
    for choice, answer in enumerate(answers):
        if answer.finish_reason == "abort" and not answer.ids:
            continue
        turn.record(
            prompt_ids=prompt,
            ids=answer.ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            provenance=answer.provenance,
            message=messages[choice] if messages else None,
            choice=choice,
        )


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
