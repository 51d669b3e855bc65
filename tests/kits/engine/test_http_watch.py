"""Answers that take long, from servers that work and from servers that hang. The clock is real, the timeouts short."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from corelm.errors import BackendClosedError, BackendTimeoutError
from corelm_engine_kit import ProgressProbe, Streamed
from corelm_engine_kit.http_watch import ServerWatch
from helpers.http_clients import Connect, is_echo
from helpers.http_server import PATIENCE, FaultServer, Reply, Request, event_stream, hang, held, json_reply, raw
from helpers.processes import wait_until

PROBE = ProgressProbe(rows="/rows", page="/counters", progress=lambda text: text or None, alive="/alive")
#: The system's list of connections.
TABLE = Path("/proc/self/net/tcp")
#: Seconds without progress: enough for a server that works, even on a busy machine, and a time to wait for.
LONG, SHORT = 1.5, 0.2


class Server:
    """Answers a POST once its pages have been asked `asks` times. A page is a function that returns a reply."""

    def __init__(self, asks: int = 10**9) -> None:
        self._asks = itertools.count(1)
        self._until, self.gate = asks, threading.Event()
        self.pages: dict[str, Callable[[], Reply]] = {"/counters": self.growing, "/alive": lambda: raw(b"{}")}
        self._counter = itertools.count()

    def growing(self) -> Reply:
        return raw(b"tokens %d" % next(self._counter))

    def __call__(self, request: Request) -> Reply:
        if request.method == "GET":
            if next(self._asks) >= self._until:
                self.gate.set()
            return self.pages[request.path]()
        if self._until == 10**9:
            return hang()
        return held(json_reply({"you said": request.body}), self.gate)


def rows(client: Any, payloads: list[Any], timeout: float | None = 60.0, **options: Any) -> list[Any]:
    names = [str(number) for number, _ in enumerate(payloads)]
    found: list[Any] = client.post_each("/rows", payloads, names=names, is_reply_to=is_echo, timeout=timeout, **options)
    return found


# It works -------------------------------------------------------------------------------------------------------------


def test_an_answer_may_take_many_read_timeouts_while_counters_grow(connect: Connect, serve: Any) -> None:
    server = serve(Server(asks=6))
    assert rows(connect(server, read_timeout=LONG, progress_probe=PROBE), [1, 2]) == [{"you said": 1}, {"you said": 2}]
    # One watch, not one for each row. Six waits of a quarter come after the first read timeout.
    assert server.paths().count("/rows") == 2 and server.paths().count("/counters") == 6


def test_nothing_is_asked_while_answers_are_quick(connect: Connect, serve: Any) -> None:
    server = serve()
    client = connect(server, progress_probe=PROBE)
    assert rows(client, [1, 2]) == [{"you said": 1}, {"you said": 2}]
    assert client.post("/load", 3) == {"you said": 3}
    assert server.paths() == ["/rows", "/rows", "/load"]


@pytest.mark.parametrize("page", [lambda: raw(b"", 404), lambda: raw(b"")], ids=["missing", "uncounted"])
def test_a_server_without_counters_need_only_be_alive(connect: Connect, serve: Any, page: Callable[[], Reply]) -> None:
    work = Server(asks=12)
    work.pages["/counters"] = page
    assert rows(connect(serve(work), read_timeout=LONG, progress_probe=PROBE), [1]) == [{"you said": 1}]


def test_a_page_without_progress_is_a_sign_by_itself(connect: Connect, serve: Any) -> None:
    server = serve(Server(asks=6))
    probe = ProgressProbe(rows="/rows", page="/counters", alive="/alive")
    assert rows(connect(server, read_timeout=LONG, progress_probe=probe), [1]) == [{"you said": 1}]
    assert "/alive" not in server.paths()


def test_while_weights_are_loaded_the_server_need_only_be_alive(connect: Connect, serve: Any) -> None:
    work = Server(asks=6)
    work.pages["/counters"] = hang
    server = serve(work)
    assert connect(server, read_timeout=LONG, progress_probe=PROBE).post("/load", 1) == {"you said": 1}
    assert server.paths() == ["/load", *["/alive"] * 6]


def test_events_of_a_reply_are_signs(connect: Connect, serve: Any) -> None:
    """The pages do not answer, as behind a proxy that serves nothing else."""
    asks = threading.Semaphore(0)

    def events() -> Iterator[int]:
        for number in range(8):
            assert asks.acquire(timeout=PATIENCE)
            yield number

    def answer(request: Request) -> Reply:
        asks.release()
        return event_stream(events()) if request.method == "POST" else raw(b"", 503)

    streamed = Streamed(joined=lambda reply, event: [*(reply or []), event], tell=lambda number, reply: None)
    client = connect(serve(answer), read_timeout=LONG, progress_probe=PROBE, max_retries=0)
    assert rows(client, [1], streamed=streamed) == [list(range(8))]


def test_a_page_of_a_busy_server_may_take_longer_than_an_answer_may_be_silent(connect: Connect, serve: Any) -> None:
    """The page comes when the client that waits no longer than for an answer has given up."""
    gate = threading.Event()
    server = serve(lambda request: held(json_reply("a page"), gate))
    impatient, client = connect(server, read_timeout=SHORT), connect(server, read_timeout=SHORT, progress_probe=PROBE)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.get, "/page")
        server.wait_for(lambda: server.in_flight == 1)
        with pytest.raises(BackendTimeoutError, match=r"for 0\.2 s"):
            impatient.get("/page")
        gate.set()
        assert future.result(PATIENCE) == "a page"


# It hangs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [hang, lambda: raw(b"tokens 7"), lambda: raw(b"", 503)],
    ids=["silent", "counters-stand-still", "says-that-it-is-ill"],
)
def test_a_server_that_shows_no_work_hangs(connect: Connect, serve: Any, page: Callable[[], Reply]) -> None:
    work = Server()
    work.pages["/counters"] = page
    server = serve(work)
    found = rows(connect(server, read_timeout=SHORT, progress_probe=PROBE), [1, 2])
    assert [type(entry) for entry in found] == [BackendTimeoutError] * 2
    assert "the server hangs; it gave no answer and made no progress for 0.2 s" in str(found[0])
    # The connections are closed, and the requests are not sent again.
    server.wait_for(lambda: server.in_flight == 0)
    assert server.paths().count("/rows") == 2 and "/counters" in server.paths()


def test_a_server_that_stops_working_in_the_middle_hangs(connect: Connect, serve: Any) -> None:
    work = Server()
    pages = itertools.chain([work.growing] * 6, itertools.repeat(hang))
    work.pages["/counters"] = lambda: next(pages)()
    server = serve(work)
    (found,) = rows(connect(server, read_timeout=SHORT, progress_probe=PROBE), [1])
    assert isinstance(found, BackendTimeoutError) and server.paths().count("/counters") > 6


def test_loading_weights_fails_if_the_server_is_not_alive(connect: Connect, serve: Any) -> None:
    work = Server()
    work.pages["/alive"] = hang
    with pytest.raises(BackendTimeoutError, match=r"POST /load at .*: the server hangs"):
        connect(serve(work), read_timeout=SHORT, progress_probe=PROBE).post("/load", 1)


@pytest.mark.parametrize(("read", "page", "told"), [(SHORT, 0.3, "0.3"), (0.3, SHORT, "0.3")])
def test_a_page_that_hangs_fails_after_the_longer_of_two_limits(
    connect: Connect, serve: Any, read: float, page: float, told: str
) -> None:
    client = connect(serve(lambda request: hang()), read_timeout=read, page_timeout=page, progress_probe=PROBE)
    with pytest.raises(BackendTimeoutError, match=rf"GET /page at .* received for {told} s"):
        client.get("/page")


def test_a_request_to_a_server_that_works_again_is_served(connect: Connect, serve: Any) -> None:
    work = Server()
    work.pages["/counters"] = lambda: raw(b"tokens 7")
    server = serve(work)
    client = connect(server, read_timeout=SHORT, progress_probe=PROBE)
    assert isinstance(rows(client, [1])[0], BackendTimeoutError)
    server.answer = lambda request: json_reply({"you said": request.body})
    assert rows(client, [2]) == [{"you said": 2}]


# Ends -----------------------------------------------------------------------------------------------------------------


def test_the_timeout_of_a_call_ends_it_although_the_server_works(connect: Connect, serve: Any) -> None:
    with pytest.raises(BackendTimeoutError, match="1 of 1 requests were not answered within 2 s"):
        rows(connect(serve(Server()), read_timeout=LONG, progress_probe=PROBE), [1], timeout=2.0)


def test_closing_the_client_ends_the_watch(connect: Connect, serve: Any) -> None:
    """The fixture checks that the client's thread has ended."""
    work = Server()
    work.pages["/counters"] = hang
    server: FaultServer = serve(work)
    client = connect(server, read_timeout=LONG, progress_probe=PROBE)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(rows, client, [1])
        server.wait_for(lambda: server.paths() == ["/rows", "/counters"])
        client.close()
        with pytest.raises(BackendClosedError):
            future.result(PATIENCE)
    server.wait_for(lambda: server.in_flight == 0)


@pytest.mark.nightly
@pytest.mark.skipif(not TABLE.exists(), reason="needs /proc")
def test_the_system_notices_a_silent_connection_that_is_lost(connect: Connect, serve: Any) -> None:
    work = Server(asks=10**6)
    server: FaultServer = serve(work)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(rows, connect(server, progress_probe=PROBE), [1])
        server.wait_for(lambda: server.paths() == ["/rows"])
        try:
            # Remote address and kind of timer of each connection: 02 is the one of keep-alive.
            assert wait_until(lambda: [line[5][:2] for line in table() if line[2] == remote(server)] == ["02"])
        finally:
            work.gate.set()
        assert future.result(PATIENCE) == [{"you said": 1}]


def table() -> list[list[str]]:
    return [line.split() for line in TABLE.read_text().splitlines()]


def remote(server: FaultServer) -> str:
    return f"0100007F:{server.port:04X}"


def test_a_watch_leaves_no_task() -> None:
    async def ask(page: str) -> str:
        return "tokens"

    async def main() -> None:
        watch = ServerWatch(PROBE, SHORT, ask)
        for _ in range(2):
            assert await watch.over("it", "/rows", asyncio.sleep(0, "answer")) == "answer"
            with pytest.raises(BackendTimeoutError):
                await watch.over("it", "/rows", asyncio.sleep(PATIENCE))
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
