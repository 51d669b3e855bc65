"""The HTTP client against a real server: answers, aborting, closing, and the arguments that open a client."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from corelm.errors import BackendClosedError, CoreLMError, EngineError, InvalidRequestError
from corelm_engine_kit.http import ABORTED, ConnectionSlots, HttpClient, PartialReply
from helpers.http_clients import KEY, Connect, Waits, echo, is_echo
from helpers.http_server import Reply, Request, hang, held, json_reply, raw, reset

# Answers -------------------------------------------------------------------------------------------------------------


def test_get_and_post_return_decoded_json(connect: Connect, serve: Any) -> None:
    server = serve()
    client = connect(server)
    assert client.get("/a") == {"you said": None}
    assert client.post("/b", {"x": [1, 2.5, "ä"]}) == {"you said": {"x": [1, 2.5, "ä"]}}
    assert [(request.method, request.path) for request in server.requests] == [("GET", "/a"), ("POST", "/b")]
    assert server.requests[1].headers["Content-Type"] == "application/json"


def test_the_path_of_the_base_url_precedes_the_path_of_a_request(connect: Connect, serve: Any) -> None:
    server = serve()
    connect(server.url + "/behind/").get("/a")
    assert server.paths() == ["/behind/a"]


def test_a_body_that_is_not_json_is_returned_as_text_if_asked_for(connect: Connect, serve: Any) -> None:
    client = connect(serve(lambda request: raw(b"done")))
    assert client.post("/flush", {}, expect_json=False) == "done"


def test_answers_are_in_the_order_of_their_payloads(connect: Connect, serve: Any) -> None:
    # The later a payload, the sooner its answer.
    gates = [threading.Event() for _ in range(5)]
    server = serve(lambda request: held(echo(request), gates[request.body]))
    client = connect(server)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            client.post_each, "/x", list(range(5)), names=list("abcde"), is_reply_to=is_echo, timeout=30
        )
        for gate in reversed(gates):
            server.wait_for(lambda: server.in_flight >= 1)
            gate.set()
        assert future.result() == [{"you said": number} for number in range(5)]


def test_all_threads_share_one_limit_of_requests_in_flight(connect: Connect, serve: Any) -> None:
    gate = threading.Event()
    server = serve(lambda request: held(echo(request), gate))
    client = connect(server, max_in_flight=3)

    def ask(thread: int) -> list[Any]:
        return client.post_each(
            "/x", [[thread, row] for row in range(5)], names=["r"] * 5, is_reply_to=is_echo, timeout=30
        )

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask, thread) for thread in range(4)]
        server.wait_for(lambda: server.in_flight == 3)
        gate.set()
        for thread, future in enumerate(futures):
            assert future.result() == [{"you said": [thread, row]} for row in range(5)]
    assert server.peak == 3 and len(server.requests) == 20


def test_without_a_limit_hundreds_of_requests_reach_the_server_at_once(connect: Connect, serve: Any) -> None:
    gate = threading.Event()
    server = serve(lambda request: held(echo(request), gate))
    client, rows = connect(server), list(range(256))
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(client.post_each, "/x", rows, names=["r"] * len(rows), is_reply_to=is_echo, timeout=120)
        server.wait_for(lambda: server.in_flight == len(rows))
        gate.set()
        assert answers.result() == [{"you said": row} for row in rows]


# Abort, health and closing -------------------------------------------------------------------------------------------


def test_abort_ends_exactly_the_requests_it_names(connect: Connect, serve: Any) -> None:
    gate = threading.Event()
    server = serve(lambda request: hang() if request.body == "hangs" else held(echo(request), gate))
    client = connect(server)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(client.post_each, "/x", ["hangs", 1], names=["a", "ab"], is_reply_to=is_echo, timeout=30)
        two = pool.submit(client.post_each, "/x", [2, "hangs"], names=["aa", "a"], is_reply_to=is_echo, timeout=30)
        server.wait_for(lambda: server.in_flight == 4)
        client.abort(["a", "nobody"])
        server.wait_for(lambda: server.given_up == 2)
        gate.set()
        assert one.result() == [ABORTED, {"you said": 1}] and two.result() == [{"you said": 2}, ABORTED]
    client.abort(["a"])
    assert client.post_each("/x", [3], names=["a"], is_reply_to=is_echo, timeout=30) == [{"you said": 3}]


def test_a_server_that_is_told_ends_its_requests_and_those_not_sent_are_cancelled(connect: Connect, serve: Any) -> None:
    gate = threading.Event()
    server = serve(lambda request: held(echo(request), gate))
    client = connect(server, max_in_flight=1)
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(client.post_each, "/x", [0, 1], names=["sent", "waits"], is_reply_to=is_echo, timeout=30)
        server.wait_for(lambda: server.in_flight == 1)
        client.abort(["sent", "waits"], tell=gate.set)
        assert rows.result() == [PartialReply({"you said": 0}), ABORTED]
    assert len(server.requests) == 1


def test_a_server_that_missed_an_abort_is_told_again(connect: Connect, serve: Any) -> None:
    gate, told = threading.Event(), []

    def tell() -> None:
        told.append(1)
        if len(told) == 2:
            gate.set()

    server = serve(lambda request: held(echo(request), gate))
    client = connect(server)
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(client.post_each, "/x", [0], names=["a"], is_reply_to=is_echo, timeout=30)
        server.wait_for(lambda: server.in_flight == 1)
        client.abort(["a"], tell=tell)
        assert rows.result() == [PartialReply({"you said": 0})]


def test_an_abort_does_not_end_a_request_that_begins_later_under_the_same_name(connect: Connect, serve: Any) -> None:
    gates = {"first": threading.Event(), "later": threading.Event()}
    server = serve(lambda request: held(echo(request), gates[request.body]))
    client = connect(server)
    with ThreadPoolExecutor(2) as pool:

        def ask(body: str) -> Future[Any]:
            return pool.submit(client.post_each, "/x", [body], names=["a"], is_reply_to=is_echo, timeout=30)

        rows = [ask("first")]
        server.wait_for(lambda: server.in_flight == 1)

        def tell() -> None:
            if len(rows) == 1:
                rows.append(ask("later"))
                server.wait_for(lambda: server.in_flight == 2)
                gates["first"].set()

        client.abort(["a"], tell=tell)
        gates["later"].set()
        assert [row.result() for row in rows] == [[PartialReply({"you said": "first"})], [{"you said": "later"}]]


# A server that does not obey is waited for, for a minute.
@pytest.mark.parametrize("deaf", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_connections_close_if_the_server_cannot_be_told_or_does_not_obey(
    connect: Connect, serve: Any, deaf: bool
) -> None:
    def tell() -> None:
        if not deaf:
            raise EngineError("gone")

    server = serve(lambda request: hang())
    client = connect(server)
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(client.post_each, "/x", [0], names=["a"], is_reply_to=is_echo, timeout=120)
        server.wait_for(lambda: server.in_flight == 1)
        client.abort(["a"], tell=tell)
        assert rows.result() == [ABORTED]
    server.wait_for(lambda: server.given_up == 1)


def test_answers_reports_whether_the_server_does_and_never_raises(connect: Connect, serve: Any, waits: Waits) -> None:
    server = serve(echo, raw(b""), raw(b"", 503), reset(), raw(b"", 302, {"Location": "/a"}))
    client = connect(server)
    assert [client.answers("/health") for _ in range(5)] == [True, False, False, False, True]
    server.answer = lambda request: hang()
    assert not client.answers("/health", timeout=0.05)
    assert waits == []
    client.close()
    assert not client.answers("/health")


def test_closing_ends_requests_in_flight_with_a_typed_error(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: hang())
    client = connect(server)
    with ThreadPoolExecutor(3) as pool:
        waiting = [
            pool.submit(client.post_each, "/x", [0, 1], names=["a", "b"], is_reply_to=is_echo, timeout=None),
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
        client.post_each("/x", [0], names=["a"], is_reply_to=is_echo, timeout=1)


@pytest.mark.process
def test_a_client_can_be_closed_in_a_forked_child(connect: Connect, serve: Any) -> None:
    code = """
    import os, sys
    from corelm_engine_kit import HttpClient

    client = HttpClient(sys.argv[1])
    client.get("/a")
    child = os.fork()
    if child == 0:
        client.close()
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    client.get("/b")
    client.close()
    sys.exit(status)
    """
    server = serve()
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), server.url]
    assert subprocess.run(command, timeout=60, check=False).returncode == 7 and server.paths() == ["/a", "/b"]


# Opening a client ----------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_appears_in_messages_or_logs(
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


def test_a_refused_key_is_named_in_the_error(connect: Connect, serve: Any) -> None:
    with pytest.raises(EngineError, match="api_key"):
        connect(serve(lambda request: json_reply({"error": "Unauthorized"}, 401))).get("/a")


def test_the_environments_proxy_is_not_used_for_this_machine(
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


@pytest.mark.process
@pytest.mark.parametrize("package", ["httpx2", "orjson"])
def test_without_a_package_the_error_says_what_to_install(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import corelm_engine_kit.http"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "BackendNotInstalledError" in ended.stderr and "pip install httpx2" in ended.stderr


def test_an_unusable_argument_is_refused_by_name() -> None:
    url = "http://127.0.0.1:1"
    for field, value in (
        *(
            ("base_url", url)
            for url in ("", "127.0.0.1:80", "ftp://host", "http://", "http://h?x=1", "http://h:port", 7)
        ),
        ("base_url", "http://user:b-secret@host"),
        ("connect_timeout", 0),
        ("read_timeout", -1),
        ("max_in_flight", 0),
        ("max_retries", -1),
        ("api_key", "a\nb-secret"),
        ("api_key", 5),
        ("api_key", b"b-secret"),
        ("headers", {"X-Number": 7}),
    ):
        given: dict[str, Any] = {"base_url": url, field: value}
        with pytest.raises(InvalidRequestError) as caught:
            HttpClient(given.pop("base_url"), **given)
        assert caught.value.field == field and "b-secret" not in str(caught.value), (field, value)


# How many requests a client sends at a time ---------------------------------------------------------------------------


#: Holds every slot there is, and then waits for one more.
CROWD = """
    import asyncio, resource
    from corelm_engine_kit.http import ConnectionSlots, most_slots

    resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    slots = ConnectionSlots(None, "http://there")

    async def crowd():
        for _ in range(slots.limit):
            await slots.__aenter__()
        waits = [asyncio.create_task(slots.__aenter__()) for _ in range(2)]
        await asyncio.wait(waits, timeout=0)
        [wait.cancel() for wait in waits]

    print(most_slots())
    asyncio.run(crowd())
"""


@pytest.mark.process
@pytest.mark.parametrize(("files", "slots"), [(64, 32)])
def test_a_process_with_few_files_sends_fewer_requests_and_warns_once(files: int, slots: int) -> None:
    code = textwrap.dedent(CROWD.format(files=files))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ended.stdout) == slots
    assert ended.stderr.count("requests wait in this process") == 1
    assert f"http://there: requests wait in this process while {slots} are" in ended.stderr
    assert "ulimit -n" in ended.stderr


def test_requests_that_wait_for_a_given_limit_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="corelm_engine_kit")
    entered = []

    async def one(slots: ConnectionSlots, number: int) -> None:
        async with slots:
            entered.append(number)
            await asyncio.sleep(0)

    async def crowd() -> None:
        roomy, tight = ConnectionSlots(3, "http://roomy"), ConnectionSlots(1, "http://tight")
        await asyncio.gather(*(one(slots, number) for slots in (roomy, tight) for number in range(3)))

    asyncio.run(crowd())
    assert sorted(entered) == [0, 0, 1, 1, 2, 2]
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "max_in_flight=" in record.getMessage()
    assert record.getMessage().startswith("http://tight: requests wait in this process while 1 are")
