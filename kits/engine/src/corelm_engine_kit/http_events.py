"""Event streams: how servers of language models send a reply in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from corelm.errors import EngineError, InvalidRequestError
from corelm_engine_kit.http_errors import MESSAGE_LENGTH, REFUSED, TransientError

#: The data of the event that ends a stream.
_DONE = b"[DONE]"


@dataclass(frozen=True)
class Streamed:
    """What `HttpClient.post_each` does with the events of replies that are streamed.

    Attributes:
        joined: ``joined(reply, event)`` returns the reply so far from the reply before the event, which is None at
            first, and the event, decoded from JSON. It may change `reply` and return it.
        tell: ``tell(number, reply)`` takes the number of a request and its reply so far, after each event. The thread
            of the client calls it, so it returns at once.
    """

    joined: Callable[[Any, Any], Any]
    tell: Callable[[int, Any], None]


async def streamed_reply(
    events: Callable[[Callable[[Any], None]], Awaitable[None]],
    check: Callable[[Any], None],
    number: int,
    streamed: Streamed,
) -> Any:
    """Return the reply that the events of one request make together.

    Args:
        events: sends the request and passes each event on.
        check: raises a `TransientError` for an event of another request.
        number: the number of the request.
        streamed: what to do with the events.

    Raises:
        InvalidRequestError: the server refused the request.
        TransientError: a failure that may pass, before the first event.
        EngineError: every other failure. One after the first event is never transient: the beginning of the answer has
            been handed on, and the next answer may begin in another way.
    """
    reply, told = None, False

    def take(event: Any) -> None:
        nonlocal reply, told
        check(event)
        _raise_error(event)
        reply = streamed.joined(reply, event)
        told = True
        streamed.tell(number, reply)

    try:
        await events(take)
    except TransientError as error:
        if not told:
            raise
        raise EngineError(
            f"{error}; the beginning of the answer was streamed, so the request is not sent again", usable=error.usable
        ) from error
    return reply


async def event_data(pieces: AsyncIterable[bytes], longest: int) -> AsyncIterator[bytes]:
    """Yield the data of each event of a stream until the event ``[DONE]``.

    Each event is one line ``data: …``. Other lines are blank or comments.

    Args:
        pieces: the body.
        longest: the most bytes that an event may have.

    Raises:
        ValueError: an event is longer.
        EOFError: the body ends before ``[DONE]``.
    """
    line = bytearray()
    async for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            line += end
            if line.startswith(b"data:"):
                data = bytes(line[len(b"data:") :]).strip()
                if data == _DONE:
                    return
                yield data
            line.clear()
        line += rest
        if len(line) > longest:
            raise ValueError(f"an event is longer than {longest} bytes")
    raise EOFError("the stream of events ends before its last event")


def _raise_error(event: Any) -> None:
    """Raise the error that an event reports, if it reports one: the status was sent before the server knew."""
    error = event.get("error") if isinstance(event, dict) else None
    if error is None:
        return
    found = error if isinstance(error, dict) else {}
    said = f"the server reports an error: {str(found.get('message', error))[:MESSAGE_LENGTH]}"
    raise InvalidRequestError(said) if found.get("code") in REFUSED else EngineError(said)
