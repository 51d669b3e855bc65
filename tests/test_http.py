"""The HTTP client against a real server that misbehaves: what is repeated, what is not, and what callers get."""

from __future__ import annotations

import asyncio
import email.utils
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from corelm.errors import BackendClosedError, BackendTimeoutError, CoreLMError, EngineError, InvalidRequestError
from corelm.http import ABORTED, HttpClient
from http_server import FaultServer, Reply, Request, hang, held, json_reply, raw, reset, truncated

KEY = "sk-a-secret-of-this-test"
Connect = Callable[..., HttpClient]


def echo(request: Request) -> Reply:
    return json_reply({"you said": request.body})


class Waits(list[float]):
    """Notes how long it was to sleep, and does not."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def connect(waits: Waits) -> Iterator[Connect]:
    """``connect(server, **options)``: a client that does not sleep; closed, with its thread gone, after the test."""
    before = set(threading.enumerate())
    with ExitStack() as stack:

        def make(server: FaultServer | str, **options: Any) -> HttpClient:
            url = server if isinstance(server, str) else server.url
            client = HttpClient(url, **{"sleep": waits, **options})
            stack.callback(client.close)
            return client

        yield make
    left = {thread for thread in threading.enumerate() if thread.name.startswith("corelm-http")} - before
    assert not left


@pytest.fixture
def serve() -> Iterator[Callable[..., FaultServer]]:
    with ExitStack() as stack:
        yield lambda answer=echo, *first, **options: stack.enter_context(FaultServer(answer, *first, **options))


# What goes well ------------------------------------------------------------------------------------------------------


def test_get_and_post_give_decoded_json(connect: Connect, serve: Any) -> None:
    server = serve()
    client = connect(server)
    assert client.get("/a") == {"you said": None}
    assert client.post("/b", {"x": [1, 2.5, "ä"]}) == {"you said": {"x": [1, 2.5, "ä"]}}
    assert [(request.method, request.path) for request in server.requests] == [("GET", "/a"), ("POST", "/b")]
    assert server.requests[1].headers["Content-Type"] == "application/json"


def test_a_path_of_the_base_url_comes_first(connect: Connect, serve: Any) -> None:
    server = serve()
    connect(server.url + "/behind/").get("/a")
    assert server.paths() == ["/behind/a"]


def test_an_answer_that_is_no_json_is_given_as_text_where_that_is_expected(connect: Connect, serve: Any) -> None:
    client = connect(serve(lambda request: raw(b"done")))
    assert client.post("/flush", {}, expect_json=False) == "done"


def test_answers_come_in_the_order_of_their_payloads(connect: Connect, serve: Any) -> None:
    # The later a payload, the sooner its answer.
    gates = [threading.Event() for _ in range(5)]
    server = serve(lambda request: held(echo(request), gates[request.body]))
    client = connect(server)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.post_each, "/x", list(range(5)), names=list("abcde"), timeout=30)
        for gate in reversed(gates):
            server.wait_for(lambda: server.in_flight >= 1)
            gate.set()
        assert future.result() == [{"you said": number} for number in range(5)]


def test_no_payloads_are_no_requests(connect: Connect, serve: Any) -> None:
    server = serve()
    assert connect(server).post_each("/x", [], names=[], timeout=1) == [] and server.requests == []


def test_many_threads_share_one_bound_on_what_is_in_flight(connect: Connect, serve: Any) -> None:
    gate = threading.Event()
    server = serve(lambda request: held(echo(request), gate))
    client = connect(server, max_in_flight=3)

    def ask(thread: int) -> list[Any]:
        return client.post_each("/x", [[thread, row] for row in range(5)], names=["r"] * 5, timeout=30)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask, thread) for thread in range(4)]
        server.wait_for(lambda: server.in_flight == 3)
        gate.set()
        for thread, future in enumerate(futures):
            assert future.result() == [{"you said": [thread, row]} for row in range(5)]
    assert server.peak == 3 and len(server.requests) == 20


# What is repeated ----------------------------------------------------------------------------------------------------

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
    "bad-gzip": raw(b"this is not gzip", headers={"Content-Encoding": "gzip"}),
    "reset": reset(),
    "closed": raw(b"{}", headers={"Content-Length": "100", "Connection": "close"}),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_may_pass_is_tried_again(connect: Connect, serve: Any, waits: Waits, fault: str) -> None:
    server = serve(echo, PASSING[fault], PASSING[fault])
    if fault in ("truncated", "closed"):
        # The connection must end for the client to see it.
        server.first = [closing(reply) for reply in server.first]
    assert connect(server).post_each("/x", [7], names=["a"], timeout=30) == [{"you said": 7}]
    assert len(server.requests) == 3 and len(waits) == 2
    assert 0 < waits[0] < waits[1]


def closing(reply: Reply) -> Reply:
    def write(handler: Any) -> None:
        reply(handler)
        handler.close_connection = True

    return write


@pytest.mark.parametrize("fault", ["429", "garbage", "reset"])
def test_get_is_tried_again_and_post_only_if_that_is_safe(connect: Connect, serve: Any, fault: str) -> None:
    server = serve(echo, PASSING[fault])
    client = connect(server)
    assert client.get("/a") == {"you said": None}
    server.first.append(PASSING[fault])
    with pytest.raises(EngineError):
        client.post("/b", {})
    assert server.paths() == ["/a", "/a", "/b"]
    server.first.append(PASSING[fault])
    assert client.post("/c", 1, retry=True) == {"you said": 1}


def test_after_the_last_try_a_row_has_its_error_and_the_others_their_answers(
    connect: Connect, serve: Any, waits: Waits
) -> None:
    def answer(request: Request) -> Reply:
        return json_reply({"error": {"message": "step failed"}}, 500) if request.body == 1 else echo(request)

    server = serve(answer)
    found = connect(server, max_retries=3).post_each("/x", [0, 1, 2], names=list("abc"), timeout=30)
    assert found[0] == {"you said": 0} and found[2] == {"you said": 2}
    assert isinstance(found[1], EngineError)
    for part in ("POST /x", server.url, "500", "step failed"):
        assert part in str(found[1])
    assert len(server.requests) == 2 + 4 and len(waits) == 3


def test_a_refused_connection_is_an_engine_error_that_says_where(connect: Connect, waits: Waits) -> None:
    with FaultServer(echo) as server:
        url = server.url
    with pytest.raises(EngineError, match=url) as caught:
        connect(url, max_retries=2).get("/a")
    assert caught.value.usable is False and len(waits) == 2


def test_a_server_that_comes_back_serves_the_rows_that_waited_for_it(connect: Connect) -> None:
    with FaultServer(echo) as server:
        port = server.port
    asleep, back = threading.Event(), threading.Event()

    async def sleep(seconds: float) -> None:
        asleep.set()
        await asyncio.get_running_loop().run_in_executor(None, back.wait, 30)

    client = connect(f"http://127.0.0.1:{port}", sleep=sleep)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.post_each, "/x", [1, 2], names=["a", "b"], timeout=30)
        assert asleep.wait(30)
        with FaultServer(echo, port=port):
            back.set()
            assert future.result() == [{"you said": 1}, {"you said": 2}]


def test_retry_after_is_granted_within_reason(connect: Connect, serve: Any, waits: Waits) -> None:
    later = email.utils.formatdate(time.time() + 40, usegmt=True)
    replies = [json_reply({}, 429, {"Retry-After": text}) for text in ("7", later, "86400", "soon", "-3", "nan")]
    connect(serve(echo, *replies), max_retries=6).get("/a")
    assert waits[0] == 7 and 30 < waits[1] <= 40 and waits[2] == 60
    # What cannot be read leaves the usual wait: 0.5, 1, 2, 4, … and up to half a second.
    assert 4 <= waits[3] <= 4.5 and 8 <= waits[4] <= 8.5 and 15 <= waits[5] <= 15.5


def test_every_repetition_is_logged(connect: Connect, serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "corelm.http"):
        connect(serve(echo, PASSING["500"])).get("/a")
    (record,) = caplog.records
    assert "GET /a" in record.getMessage() and "500" in record.getMessage()


# What is not ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_refused_row_has_the_servers_words_and_the_others_their_answers(
    connect: Connect, serve: Any, waits: Waits, status: int
) -> None:
    bodies = [{"error": {"message": "too long by 3", "code": 1}}, {"message": "too long by 3"}, "too long by 3"]

    def answer(request: Request) -> Reply:
        return echo(request) if request.body is None else json_reply(request.body, status)

    found = connect(serve(answer)).post_each("/x", [None, *bodies, {"detail": "no"}], names=list("abcde"), timeout=30)
    assert found[0] == {"you said": None}
    for entry in found[1:4]:
        assert isinstance(entry, InvalidRequestError)
        assert str(status) in str(entry) and str(entry).endswith(": too long by 3")
    assert str(found[4]).endswith(": no") and waits == []


def test_a_long_message_is_cut(connect: Connect, serve: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        connect(serve(lambda request: json_reply({"message": "x" * 5000}, 400))).get("/a")
    assert 300 <= str(caught.value).count("x") < 310


def test_redirects_are_not_followed(connect: Connect, serve: Any, waits: Waits) -> None:
    elsewhere = serve()
    server = serve(lambda request: raw(b"", 307, {"Location": elsewhere.url + "/b"}))
    with pytest.raises(EngineError, match="not followed") as caught:
        connect(server, api_key=KEY).post("/a", {}, retry=True)
    assert elsewhere.url in str(caught.value)
    assert elsewhere.requests == [] and len(server.requests) == 1 and waits == []


def test_a_server_that_hangs_is_a_timeout_and_not_asked_again(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: hang())
    client = connect(server, read_timeout=0.05)
    with pytest.raises(BackendTimeoutError, match="hangs"):
        client.get("/a")
    found = client.post_each("/x", [0, 1], names=["a", "b"], timeout=30)
    assert [type(entry) for entry in found] == [BackendTimeoutError] * 2
    server.wait_for(lambda: server.given_up == 3)
    assert len(server.requests) == 3


def test_the_time_of_a_call_ends_all_that_is_in_flight(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: hang() if request.body else echo(request))
    client = connect(server)
    with pytest.raises(BackendTimeoutError, match="3 of 3") as caught:
        client.post_each("/x", [1, 2, 3], names=list("abc"), timeout=2.0)
    assert server.url in str(caught.value) and isinstance(caught.value, TimeoutError)
    # The connections are closed, so the server knows that nobody waits any more.
    server.wait_for(lambda: server.given_up == 3 and server.in_flight == 0)
    assert client.post_each("/x", [0], names=["a"], timeout=30) == [{"you said": 0}]


def test_the_time_of_a_call_counts_the_waits_between_tries(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: raw(b"", 503, {"Retry-After": "50"}))
    client = connect(server, sleep=asyncio.sleep)
    for ask in (
        lambda: client.get("/a", timeout=0.2),
        lambda: client.post_each("/x", [1], names=["a"], timeout=0.2),
        lambda: client.post("/a", 1, retry=True, timeout=0.2),
    ):
        with pytest.raises(BackendTimeoutError):
            ask()


def test_what_json_cannot_say_is_refused_before_anything_is_sent(connect: Connect, serve: Any) -> None:
    server = serve()
    for payload in (float("nan"), {1, 2}):
        with pytest.raises(InvalidRequestError, match="JSON"):
            connect(server).post_each("/x", [1, payload], names=["a", "b"], timeout=30)
    assert server.requests == []


# Abort, health and the end -------------------------------------------------------------------------------------------


def test_abort_ends_exactly_the_requests_it_names(connect: Connect, serve: Any) -> None:
    gate = threading.Event()
    server = serve(lambda request: hang() if request.body == "hangs" else held(echo(request), gate))
    client = connect(server)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(client.post_each, "/x", ["hangs", 1], names=["a", "ab"], timeout=30)
        two = pool.submit(client.post_each, "/x", [2, "hangs"], names=["aa", "a"], timeout=30)
        server.wait_for(lambda: server.in_flight == 4)
        client.abort(["a", "nobody"])
        server.wait_for(lambda: server.given_up == 2)
        gate.set()
        assert one.result() == [ABORTED, {"you said": 1}] and two.result() == [{"you said": 2}, ABORTED]
    client.abort(["a"])
    assert client.post_each("/x", [3], names=["a"], timeout=30) == [{"you said": 3}]


def test_with_grace_what_was_sent_may_answer_and_what_waits_may_not(connect: Connect, serve: Any) -> None:
    gate = threading.Event()
    server = serve(lambda request: held(echo(request), gate))
    client = connect(server, max_in_flight=1)
    with ThreadPoolExecutor(2) as pool:
        rows = pool.submit(client.post_each, "/x", [0, 1], names=["sent", "waits"], timeout=30)
        server.wait_for(lambda: server.in_flight == 1)
        abort = pool.submit(client.abort, ["sent", "waits"], grace=30)
        client.abort(["waits"])
        gate.set()
        assert rows.result() == [{"you said": 0}, ABORTED] and abort.result() is None
    assert len(server.requests) == 1


def test_grace_is_over_when_it_is_over(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: hang())
    client = connect(server)
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(client.post_each, "/x", [0], names=["a"], timeout=30)
        server.wait_for(lambda: server.in_flight == 1)
        client.abort(["a"], grace=0.01)
        assert rows.result() == [ABORTED]


def test_answers_says_whether_the_server_does_and_never_raises(connect: Connect, serve: Any, waits: Waits) -> None:
    server = serve(echo, raw(b""), raw(b"", 503), reset(), raw(b"", 302, {"Location": "/a"}))
    client = connect(server)
    assert [client.answers("/health") for _ in range(5)] == [True, False, False, False, True]
    server.answer = lambda request: hang()
    assert not client.answers("/health", timeout=0.05)
    assert waits == []
    client.close()
    assert not client.answers("/health")


def test_closing_ends_what_is_in_flight_with_a_typed_error(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: hang())
    client = connect(server)
    with ThreadPoolExecutor(3) as pool:
        waiting = [
            pool.submit(client.post_each, "/x", [0, 1], names=["a", "b"], timeout=None),
            pool.submit(client.get, "/a"),
            pool.submit(client.post, "/b", {}),
        ]
        server.wait_for(lambda: server.in_flight == 4)
        client.close()
        for future in waiting:
            with pytest.raises(BackendClosedError):
                future.result(30)
    server.wait_for(lambda: server.given_up == 4)
    client.close()
    with pytest.raises(BackendClosedError):
        client.post_each("/x", [0], names=["a"], timeout=1)


# What it is opened with ----------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_told(
    connect: Connect, serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def tell(request: Request) -> Reply:
        status = {"/401": 401, "/400": 400, "/500": 500, "/307": 307, "/200": 200}[request.path]
        return raw(f"you are {request.headers['Authorization']}".encode(), status, {"Location": f"http://{KEY}.x/"})

    server = serve(tell)
    client = connect(server, api_key=KEY, max_retries=1)
    with caplog.at_level("INFO"):
        for path in ("/401", "/400", "/500", "/307", "/200"):
            with pytest.raises(CoreLMError) as caught:
                client.get(path)
            assert KEY not in str(caught.value) + repr(caught.value)
    assert {request.headers["Authorization"] for request in server.requests} == {f"Bearer {KEY}"}
    assert KEY not in repr(client) + caplog.text
    monkeypatch.setenv("A_KEY_OF_THIS_TEST", KEY)
    assert "Bearer" in connect(server, key_variable="A_KEY_OF_THIS_TEST").post("/200", {}, expect_json=False)
    assert server.requests[-1].headers["Authorization"] == f"Bearer {KEY}"


def test_a_refused_key_says_so(connect: Connect, serve: Any) -> None:
    with pytest.raises(EngineError, match="api_key"):
        connect(serve(lambda request: json_reply({"error": "Unauthorized"}, 401))).get("/a")


def test_the_environments_proxy_is_not_asked_for_this_machine(
    connect: Connect, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, server = serve(), serve()
    for name in ("ALL_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("http_proxy", proxy.url)
    connect(server).get("/a")
    assert proxy.requests == [] and len(server.requests) == 1
    connect("http://server.invalid", max_retries=0).get("/a")
    assert len(proxy.requests) == 1


def test_without_httpx_the_command_to_type_is_said() -> None:
    code = "import sys; sys.modules['httpx'] = None; import corelm.http"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "BackendNotInstalledError" in ended.stderr and 'pip install "core[http]"' in ended.stderr


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:80", "ftp://host", "http://", "http://user:hidden-word@host", "http://h?x=1", "http://h:port", 7],
)
def test_a_base_url_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        HttpClient(url)
    assert caught.value.field == "base_url" and "hidden-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("connect_timeout", 0),
        ("read_timeout", -1),
        ("max_in_flight", 0),
        ("max_retries", -1),
        ("api_key", "a\nb-secret"),
    ],
)
def test_an_argument_that_cannot_be_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        HttpClient("http://127.0.0.1:1", **{field: value})
    assert caught.value.field == field and "b-secret" not in str(caught.value)
