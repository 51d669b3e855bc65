"""Replies that arrive as a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from corelm.errors import CoreLMError, EngineError, InvalidRequestError
from corelm_engine_kit import Streamed
from corelm_engine_kit.http_events import event_data
from helpers.http_clients import KEY, Connect, is_echo
from helpers.http_server import event_stream, json_reply, raw

#: What a stream of events says that it is.
EVENTS = {"Content-Type": "text/event-stream"}


def data_of(pieces: list[bytes], longest: int = 100) -> list[bytes]:
    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def read() -> list[bytes]:
        return [data async for data in event_data(body(), longest)]

    return asyncio.run(read())


def test_events_are_found_however_the_body_is_cut():
    body = b': hello\n\ndata: {"a": 1}\r\n\r\ndata:{"b": "\xc3\xa4"}\n\nid: 3\ndata: [DONE]\n\ndata: late\n'
    expected = [b'{"a": 1}', b'{"b": "\xc3\xa4"}']
    for size in (1, 2, 3, 7, len(body)):
        assert data_of([body[at : at + size] for at in range(0, len(body), size)]) == expected


def test_a_stream_without_its_end_and_an_endless_event_are_errors():
    with pytest.raises(EOFError):
        data_of([b"data: 1\n"])
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        data_of([b"data: ", b"x" * 200])


def streamed(seen: list[tuple[int, Any]]) -> Streamed:
    """Join events by collecting them, and note every reply so far."""
    return Streamed(lambda reply, event: [*(reply or []), event], lambda number, reply: seen.append((number, reply)))


def post(client: Any, payloads: list[Any], seen: list[tuple[int, Any]]) -> list[Any]:
    names = [str(number) for number in range(len(payloads))]
    return client.post_each("/x", payloads, names=names, is_reply_to=is_echo, timeout=30, streamed=streamed(seen))


def test_each_event_is_told_with_the_reply_so_far(connect: Connect, serve: Any) -> None:
    seen: list[tuple[int, Any]] = []
    client = connect(serve(lambda request: event_stream([request.body, "b"])))
    assert post(client, ["p", "q"], seen) == [["p", "b"], ["q", "b"]]
    assert sorted(seen, key=lambda each: (each[0], len(each[1]))) == [
        (0, ["p"]),
        (0, ["p", "b"]),
        (1, ["q"]),
        (1, ["q", "b"]),
    ]


def test_a_stream_that_breaks_off_is_repeated_only_before_its_first_event(connect: Connect, serve: Any) -> None:
    seen: list[tuple[int, Any]] = []
    server = serve(lambda request: event_stream(["a"]))
    server.first = [event_stream([], ends=False), json_reply("busy", 503)]
    assert post(connect(server), ["p"], seen) == [["a"]] and len(server.requests) == 3
    server.first = [event_stream(["a"], ends=False)]
    (entry,) = post(connect(server), ["p"], seen)
    assert isinstance(entry, EngineError) and "not sent again" in str(entry) and len(server.requests) == 4


@pytest.mark.parametrize(
    "reply, kind, message",
    [
        (json_reply({"detail": "no such field"}, 400), InvalidRequestError, "no such field"),
        (event_stream([{"error": {"message": "too long", "code": 400}}]), InvalidRequestError, "too long"),
        (event_stream([{"error": "dead"}]), EngineError, "the server reports an error: dead"),
        (raw(b"data: {\n\ndata: [DONE]\n", headers=EVENTS), EngineError, "Expecting"),
        (json_reply({}), EngineError, "not a stream of events"),
        (raw(b"", headers={**EVENTS, "Content-Encoding": "gzip"}), EngineError, "compressed"),
    ],
)
def test_what_is_no_stream_is_a_typed_error(
    connect: Connect, serve: Any, reply: Any, kind: type[CoreLMError], message: str
) -> None:
    (entry,) = post(connect(serve(lambda request: reply), max_retries=0), ["p"], [])
    assert isinstance(entry, kind) and message in str(entry)


def test_an_error_of_a_stream_does_not_repeat_the_key(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: event_stream([{"error": json.dumps(dict(request.headers))}]))
    (entry,) = post(connect(server, api_key=KEY, max_retries=0), ["p"], [])
    assert isinstance(entry, EngineError) and KEY not in str(entry)
