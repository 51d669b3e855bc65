"""The bodies of replies: streams of events, and JSON."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corelm.errors import CoreLMError, EngineError, InvalidRequestError
from corelm_engine_kit import Streamed
from corelm_engine_kit.http_events import event_data
from corelm_engine_kit.http_json import decoded, encoded
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


# JSON: bodies decode as `json.loads` decodes them ---------------------------------------------------------------------


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(width=32) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def told(body: bytes) -> str:
    """Return what `json` makes of a body, or the kind of its refusal. A repr tells NaN, -0.0, 1 and 1.0 apart."""
    try:
        return repr(json.loads(body))
    except (ValueError, RecursionError) as error:
        return type(error).__name__


@given(VALUES, st.booleans())
def test_a_body_decodes_as_python_decodes_it(value: Any, plain: bool) -> None:
    # `value` may hold NaN and infinity, and lone surrogates if everything is written in ASCII.
    body = json.dumps(value, ensure_ascii=plain).encode("utf-8", "surrogatepass")
    assert repr(decoded(body)) == told(body)
    assert repr(decoded(bytearray(body))) == told(body)


def test_an_odd_body_is_read_or_refused_as_python_does() -> None:
    for body in (
        b"[NaN, Infinity, -Infinity, -1e400, 1e400, -0, -0.0, 1E2]",
        b'{"a": 1, "a": 2}',
        b'"\\ud800"',
        b"\xef\xbb\xbf[1]",
        "[1]".encode("utf-16"),
        b"-%d" % 10**400,
        b"",
        b" ",
        b"[1,]",
        b"nan",
        b'{"a": 1} x',
        b"\xff",
        b"[" * 2_000 + b"]" * 2_000,
        b"[" * 200_000,
        b"1" * 5_000,
    ):
        try:
            found = repr(decoded(body))
        except (ValueError, RecursionError) as error:
            found = type(error).__name__
        assert found == told(body), body[:12]


def test_an_integer_beyond_64_bits_may_become_a_float() -> None:
    assert math.isclose(decoded(b"%d" % 2**70), 2**70)


def test_numbers_that_are_none_arrive_as_the_server_wrote_them(connect: Connect, serve: Any) -> None:
    client = connect(serve(lambda request: raw(b'{"values": [-9999.0, null, NaN, -Infinity]}')))
    clamped, null, nan, infinite = client.get("/a")["values"]
    assert (clamped, null, infinite) == (-9999.0, None, -math.inf) and math.isnan(nan)


def test_a_body_that_is_cut_off_is_an_error(connect: Connect, serve: Any) -> None:
    with pytest.raises(EngineError, match="not JSON"):
        connect(serve(lambda request: raw(b'{"values": [-1.5, NaN')), max_retries=0).get("/a")


def test_what_is_no_json_is_not_written() -> None:
    for payload in ({"a": [1], "b": math.nan}, {"a": [math.inf, 1]}, math.nan, {"a": [object()]}):
        with pytest.raises((TypeError, ValueError)):
            pytest.fail(f"{payload} was written: {encoded(payload)!r}")
