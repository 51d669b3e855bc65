"""The HTTP client against a real server that misbehaves: which requests are retried, and what callers get."""

from __future__ import annotations

import asyncio
import email.utils
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from corelm.errors import BackendTimeoutError, EngineError, InvalidRequestError
from helpers.http_clients import KEY, Connect, Waits, echo, is_echo
from helpers.http_server import FaultServer, Reply, Request, hang, json_reply, raw, reset, truncated

# Retried -------------------------------------------------------------------------------------------------------------

PASSING = {
    "429": json_reply({"error": "busy"}, 429),
    "500": json_reply({"error": "oh"}, 500),
    "502": raw(b"<html>bad gateway</html>", 502),
    "503": raw(b"", 503),
    "504": raw(b"", 504),
    "garbage": raw(b"\xff\xfe not json {"),
    "empty": raw(b""),
    "truncated": truncated({"a": "long answer that is cut"}),
    "half-json": raw(b'{"a": [1, 2'),
    "reset": reset(),
    "closed": raw(b"{}", headers={"Content-Length": "100", "Connection": "close"}),
}


def test_a_failure_that_may_pass_is_retried(connect: Connect, serve: Any, waits: Waits) -> None:
    server = serve()
    client = connect(server)
    for name, fault in PASSING.items():
        # The connection of some must end for the client to see it.
        server.first += [closing(fault) if name in ("truncated", "closed") else fault] * 2
        found = client.post_each("/x", [7], names=["a"], is_reply_to=is_echo, timeout=30)
        assert found == [{"you said": 7}], name
        assert len(server.requests) == 3 and len(waits) == 2 and 0 < waits[0] < waits[1], name
        server.requests.clear()
        waits.clear()


def closing(reply: Reply) -> Reply:
    def write(handler: Any) -> None:
        reply(handler)
        handler.close_connection = True

    return write


@pytest.mark.parametrize("fault", ["429", "garbage", "reset"])
def test_get_is_retried_and_post_only_if_the_caller_says_so(connect: Connect, serve: Any, fault: str) -> None:
    server = serve(echo, PASSING[fault])
    client = connect(server)
    assert client.get("/a") == {"you said": None}
    server.first.append(PASSING[fault])
    with pytest.raises(EngineError):
        client.post("/b", {})
    assert server.paths() == ["/a", "/a", "/b"]
    server.first.append(PASSING[fault])
    assert client.post("/c", 1, retry=True) == {"you said": 1}


def test_after_the_last_retry_a_row_has_its_error_and_the_others_their_answers(
    connect: Connect, serve: Any, waits: Waits
) -> None:
    def answer(request: Request) -> Reply:
        return json_reply({"error": {"message": "step failed"}}, 500) if request.body == 1 else echo(request)

    server = serve(answer)
    found = connect(server, max_retries=3).post_each(
        "/x", [0, 1, 2], names=list("abc"), is_reply_to=is_echo, timeout=30
    )
    assert found[0] == {"you said": 0} and found[2] == {"you said": 2}
    assert isinstance(found[1], EngineError)
    for part in ("POST /x", server.url, "500", "step failed"):
        assert part in str(found[1])
    assert len(server.requests) == 2 + 4 and len(waits) == 3


def test_the_reply_to_another_request_is_dropped_and_the_request_sent_again(connect: Connect, serve: Any) -> None:
    server = serve(echo, json_reply({"you said": "something else"}))
    assert connect(server).post_each("/x", [7], names=["a"], is_reply_to=is_echo, timeout=30) == [{"you said": 7}]
    assert len(server.requests) == 2
    server.answer = lambda request: json_reply({"you said": "something else"})
    (found,) = connect(server, max_retries=1).post_each("/x", [7], names=["a"], is_reply_to=is_echo, timeout=30)
    assert isinstance(found, EngineError) and "does not name this request" in str(found)


def test_a_refused_connection_is_an_engine_error_that_says_where(connect: Connect, waits: Waits) -> None:
    with FaultServer(echo) as server:
        client = connect(server, max_retries=2)
        client.get("/a")
    # The server has answered once, so it may come back.
    with pytest.raises(EngineError, match=f"{server.url}.*is the server running") as caught:
        client.get("/a")
    assert type(caught.value) is EngineError and caught.value.usable is False and len(waits) == 2


def test_a_server_that_never_answered_is_not_waited_for(connect: Connect, waits: Waits) -> None:
    with FaultServer(echo) as server:
        url = server.url
    client = connect(url)
    with pytest.raises(EngineError, match=f"{url}.*is the server running") as caught:
        client.get("/a")
    assert type(caught.value) is EngineError and caught.value.usable is False
    (found,) = client.post_each("/x", [7], names=["a"], is_reply_to=is_echo, timeout=30)
    assert type(found) is EngineError and waits == []


def test_the_error_after_the_last_try_is_an_engine_error(connect: Connect, serve: Any) -> None:
    server = serve()
    client = connect(server, max_retries=1)
    for name, fault in PASSING.items():
        server.answer = lambda request, fault=fault: closing(fault)
        with pytest.raises(EngineError) as caught:
            client.get("/a")
        assert type(caught.value) is EngineError, name


def test_rows_that_wait_for_a_restarted_server_are_served(connect: Connect) -> None:
    asleep, back = threading.Event(), threading.Event()

    async def sleep(seconds: float) -> None:
        asleep.set()
        await asyncio.get_running_loop().run_in_executor(None, back.wait, 30)

    with FaultServer(echo) as server:
        port = server.port
        client = connect(server, sleep=sleep)
        client.get("/a")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.post_each, "/x", [1, 2], names=["a", "b"], is_reply_to=is_echo, timeout=30)
        assert asleep.wait(30)
        with FaultServer(echo, port=port):
            back.set()
            assert future.result() == [{"you said": 1}, {"you said": 2}]


def test_retry_after_is_respected_up_to_a_minute(connect: Connect, serve: Any, waits: Waits) -> None:
    later = email.utils.formatdate(time.time() + 40, usegmt=True)
    replies = [json_reply({}, 429, {"Retry-After": text}) for text in ("7", later, "86400", "soon", "-3", "nan")]
    connect(serve(echo, *replies), max_retries=6).get("/a")
    assert waits[0] == 7 and 30 < waits[1] <= 40 and waits[2] == 60
    # A value that cannot be read leaves the usual wait: 0.5, 1, 2, 4, … and up to half a second.
    assert 4 <= waits[3] <= 4.5 and 8 <= waits[4] <= 8.5 and 15 <= waits[5] <= 15.5


def test_every_retry_is_logged(connect: Connect, serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "corelm_engine_kit.http"):
        connect(serve(echo, PASSING["500"])).get("/a")
    (record,) = caplog.records
    assert "GET /a" in record.getMessage() and "500" in record.getMessage()


# Not retried ---------------------------------------------------------------------------------------------------------


def test_a_refused_row_has_the_servers_words_and_the_others_their_answers(
    connect: Connect, serve: Any, waits: Waits
) -> None:
    bodies = [{"error": {"message": "too long by 3", "code": 1}}, {"message": "too long by 3"}, "too long by 3"]
    server = serve()
    client = connect(server)
    for status in (400, 404, 413, 422):
        server.answer = lambda request, status=status: (
            echo(request) if request.body is None else json_reply(request.body, status)
        )
        rows = [None, *bodies, {"detail": "no"}]
        found = client.post_each("/x", rows, names=list("abcde"), is_reply_to=is_echo, timeout=30)
        assert found[0] == {"you said": None}
        for entry in found[1:4]:
            assert isinstance(entry, InvalidRequestError), status
            assert str(status) in str(entry) and str(entry).endswith(": too long by 3")
        assert str(found[4]).endswith(": no") and waits == []


def test_a_long_message_is_cut(connect: Connect, serve: Any) -> None:
    for length in (3000, 5_000_000):
        with pytest.raises(InvalidRequestError) as caught:
            connect(serve(lambda request, length=length: json_reply({"message": "x" * length}, 400))).get("/a")
        assert 280 <= str(caught.value).count("x") < 310


def test_redirects_are_not_followed(connect: Connect, serve: Any, waits: Waits) -> None:
    elsewhere = serve()
    server = serve(lambda request: raw(b"", 307, {"Location": elsewhere.url + "/b"}))
    with pytest.raises(EngineError, match="not followed") as caught:
        connect(server, api_key=KEY).post("/a", {}, retry=True)
    assert elsewhere.url in str(caught.value)
    assert elsewhere.requests == [] and len(server.requests) == 1 and waits == []


def test_a_server_that_hangs_is_a_timeout_and_not_retried(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: hang())
    client = connect(server, read_timeout=0.05)
    with pytest.raises(BackendTimeoutError, match="hangs"):
        client.get("/a")
    found = client.post_each("/x", [0, 1], names=["a", "b"], is_reply_to=is_echo, timeout=30)
    assert [type(entry) for entry in found] == [BackendTimeoutError] * 2
    server.wait_for(lambda: server.given_up == 3)
    assert len(server.requests) == 3


def test_the_timeout_of_a_call_ends_all_of_its_requests(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: hang() if request.body else echo(request))
    client = connect(server)
    with pytest.raises(BackendTimeoutError, match="3 of 3") as caught:
        client.post_each("/x", [1, 2, 3], names=list("abc"), is_reply_to=is_echo, timeout=2.0)
    assert server.url in str(caught.value) and isinstance(caught.value, TimeoutError)
    # The connections are closed, so the server sees that the answers are no longer wanted.
    server.wait_for(lambda: server.given_up == 3 and server.in_flight == 0)
    assert client.post_each("/x", [0], names=["a"], is_reply_to=is_echo, timeout=30) == [{"you said": 0}]


def test_the_timeout_of_a_call_includes_the_waits_between_retries(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: raw(b"", 503, {"Retry-After": "50"}))
    client = connect(server, sleep=asyncio.sleep)
    for ask in (
        lambda: client.get("/a", timeout=0.2),
        lambda: client.post_each("/x", [1], names=["a"], is_reply_to=is_echo, timeout=0.2),
        lambda: client.post("/a", 1, retry=True, timeout=0.2),
    ):
        with pytest.raises(BackendTimeoutError):
            ask()


def test_a_payload_that_is_not_json_is_refused_before_anything_is_sent(connect: Connect, serve: Any) -> None:
    server = serve()
    for payload in (float("nan"), {1, 2}):
        with pytest.raises(InvalidRequestError, match="JSON"):
            connect(server).post_each("/x", [1, payload], names=["a", "b"], is_reply_to=is_echo, timeout=30)
    assert server.requests == []
